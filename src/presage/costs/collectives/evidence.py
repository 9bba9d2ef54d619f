"""How far a predicted collective may be off: wider the less was measured that is like it.

Ranges are 5th and 95th percentile of measured over predicted, of rows that had no part in the prediction: those of
`presage accuracy collectives` on the tables of docs/collectives.md, which says which rows each is from.
"""

from __future__ import annotations

from dataclasses import dataclass

SEEN_NODES = 32  # the most domains of a group that a prediction was compared with


@dataclass(frozen=True, slots=True)
class TimeRange:
    """How much of its predicted time a collective takes in nine of ten cases, and what that rests on."""

    low: float
    high: float
    basis: str


MEASURED = TimeRange(0.93, 1.10, "measured on this platform in this group size")
NEAR = TimeRange(0.91, 1.17, "measured on this platform in other group sizes")
SAME_LINKS = TimeRange(0.86, 1.15, "measured on other GPUs with these links")
OTHER_LINKS = TimeRange(0.65, 1.63, "from link specs, nothing measured on these links")
NODES = TimeRange(0.90, 1.63, "from link specs between nodes")
MORE_NODES = TimeRange(0.80, 2.0, f"from link specs between more nodes than were compared with ({SEEN_NODES})")
