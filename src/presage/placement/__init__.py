"""Which GPU goes where: groups of GPUs of known speeds to the (replica, stage) places of a job, for the least p95."""

from presage.placement.fleet import GpuFleet, parse_fleet, random_fleet, read_speeds
from presage.placement.hot_node import (
    Eviction,
    HotNode,
    PlacementFindings,
    SpareGpu,
    hot_node,
    hot_node_cost,
    place_job,
    placement_findings,
    spare_gpus,
    suggest_evictions,
)
from presage.placement.place import Placement, PlacementOutcome, PlacementResult, place, write_placement

__all__ = [
    "Eviction",
    "GpuFleet",
    "HotNode",
    "Placement",
    "PlacementFindings",
    "PlacementOutcome",
    "PlacementResult",
    "SpareGpu",
    "hot_node",
    "hot_node_cost",
    "parse_fleet",
    "place",
    "place_job",
    "placement_findings",
    "random_fleet",
    "read_speeds",
    "spare_gpus",
    "suggest_evictions",
    "write_placement",
]
