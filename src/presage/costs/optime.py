"""What one op costs on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["OpTime", "Source"]

Source: TypeAlias = Literal["model", "likeness", "roofline", "none"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of an op's kernels together, how many things it launches, and where the number is from."""

    seconds: float
    launches: int  # kernels, copies and memsets
    family: str  # presage.graph.families.family(op.name)
    source: Source  # none: it launches nothing
    at_once: float = 1.0  # how many of its kernels run side by side: recurrent layers work on several streams
