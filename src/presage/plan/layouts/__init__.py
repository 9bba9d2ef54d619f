"""Layouts: the ways to spread a training job over GPUs, and the search for the best."""

from presage.plan.layouts.explain import explained
from presage.plan.layouts.found import Counts, Found, Priced, Short, priced
from presage.plan.layouts.layout import Layout, laid, layout_of, words
from presage.plan.layouts.search import OBJECTIVES, Progress, search
from presage.plan.layouts.space import Space, parse_keep

__all__ = [
    "OBJECTIVES", "Counts", "Found", "Layout", "Priced", "Progress", "Short", "Space", "explained", "laid", "layout_of",
    "parse_keep", "priced", "search", "words",
]  # fmt: skip
