"""Layouts: the ways to spread a training job over GPUs, and the search for the best."""

from presage.search.explain import Difference, Missed, differences, losses, missed
from presage.search.layout import Layout, laid, layout_of, words
from presage.search.plan_search import OBJECTIVES, search
from presage.search.plan_space import Space, parse_keep
from presage.search.search_result import Counts, Found, Progress, Short, priced

__all__ = [
    "OBJECTIVES", "Counts", "Difference", "Found", "Layout", "Missed", "Progress", "Short", "Space", "differences",
    "laid", "layout_of", "losses", "missed", "parse_keep", "priced", "search", "words",
]  # fmt: skip
