"""Which GPU goes where: groups of GPUs of known speeds to the (replica, stage) places of a job, for the least p95."""

from presage.plan.place.fleet import Fleet, drawn_fleet
from presage.plan.place.place import Outcome, Placed, Placement, place
from presage.plan.place.speeds import read_speeds
from presage.plan.place.whatif import Evicted, Hot, LeftOut, evictions, hot_node, left_out

__all__ = [
    "Evicted", "Fleet", "Hot", "LeftOut", "Outcome", "Placed", "Placement", "drawn_fleet", "evictions", "hot_node",
    "left_out", "place", "read_speeds",
]  # fmt: skip
