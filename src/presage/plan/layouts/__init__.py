"""Layouts: the ways to spread a training job over GPUs, and the search for the best."""

from presage.plan.layouts.explain import Difference, Missed, differences, losses, missed
from presage.plan.layouts.found import Counts, Found, Progress, Short, priced
from presage.plan.layouts.layout import Layout, laid, layout_of, words
from presage.plan.layouts.search import OBJECTIVES, search
from presage.plan.layouts.space import Space, parse_keep

__all__ = [
    "OBJECTIVES", "Counts", "Difference", "Found", "Layout", "Missed", "Progress", "Short", "Space", "differences",
    "laid", "layout_of", "losses", "missed", "parse_keep", "priced", "search", "words",
]  # fmt: skip
