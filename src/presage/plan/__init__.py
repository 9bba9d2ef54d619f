"""Plans: which rank holds which embedding table, and the search for the best."""

from presage.plan.problem import Problem
from presage.plan.search import Found, search
from presage.plan.sharding import Placed, Plan

__all__ = ["Found", "Placed", "Plan", "Problem", "search"]
