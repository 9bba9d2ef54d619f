"""Which GPU goes where: groups of GPUs of known speeds to the (replica, stage) places of a job, for the least p95."""

from presage.placement.fleet import GpuFleet, random_fleet, read_speeds
from presage.placement.hot_node import Eviction, HotNode, SpareGpu, hot_node_cost, spare_gpus, suggest_evictions
from presage.placement.place import Placement, PlacementOutcome, PlacementResult, place

__all__ = [
    "Eviction",
    "GpuFleet",
    "HotNode",
    "Placement",
    "PlacementOutcome",
    "PlacementResult",
    "SpareGpu",
    "hot_node_cost",
    "place",
    "random_fleet",
    "read_speeds",
    "spare_gpus",
    "suggest_evictions",
]
