"""Which GPU goes where: groups of GPUs of known speeds to the (replica, stage) places of a job, for the least p95."""

from presage.placement.fleet import Fleet, drawn_fleet
from presage.placement.hot_node import Evicted, Hot, LeftOut, evictions, hot_node, left_out
from presage.placement.place import Outcome, Placed, Placement, place
from presage.placement.speeds import read_speeds

__all__ = [
    "Evicted", "Fleet", "Hot", "LeftOut", "Outcome", "Placed", "Placement", "drawn_fleet", "evictions", "hot_node",
    "left_out", "place", "read_speeds",
]  # fmt: skip
