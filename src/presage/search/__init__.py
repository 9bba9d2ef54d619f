"""Plans: the ways to spread a training job over GPUs, and the search for the best one."""

from presage.search.plan_search import OBJECTIVES, search
from presage.search.plan_space import PlanSpace, parse_keep
from presage.search.plans import JobPlan, apply_plan, job_plan, plan_words
from presage.search.quick import quick_plan
from presage.search.search_result import (
    PlanDifference,
    PricedPlan,
    SearchCounts,
    SearchProgress,
    SearchResult,
    better_neighbours,
    compare_plans,
    overheads,
    predict_plan,
)

__all__ = [
    "OBJECTIVES",
    "JobPlan",
    "PlanDifference",
    "PlanSpace",
    "PricedPlan",
    "SearchCounts",
    "SearchProgress",
    "SearchResult",
    "apply_plan",
    "better_neighbours",
    "compare_plans",
    "job_plan",
    "overheads",
    "parse_keep",
    "plan_words",
    "predict_plan",
    "quick_plan",
    "search",
]
