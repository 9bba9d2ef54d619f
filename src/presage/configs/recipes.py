"""Recipes of training beside a job's plan: how numbers become 8-bit ones, Muon's iterations, what lies on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CastCost(NamedTuple):
    """What a recipe for fp8 costs for each number of a GEMM's operand that is cast."""

    nbytes: float  # read and written, where the operand is needed as it is and transposed
    once: float  # where it is needed as it is
    launches: int
    source: str


# Of operands in 16 bits. Scaling that needs the largest number of the same tensor reads it once more before the cast.
SCALINGS = {
    "delayed": CastCost(
        4.0, 3.0, 1, "Transformer Engine: the scale is of earlier steps, the maximum is found as it casts"
    ),
    "tensor": CastCost(6.0, 5.0, 2, "current scaling: one pass for the maximum, one that casts and transposes"),
    "row": CastCost(10.0, 5.0, 4, "torchao rowwise: scales by row and by column, each with its own maxima and cast"),
    "block": CastCost(
        4.0 + 8 / 128, 3.0 + 4 / 128, 1, "DeepSeek-V3: tiles of 1 x 128, whose maximum is found as it casts"
    ),
}
# Names of other software for them.
SCALING_NAMES = {
    "tensorwise": "tensor", "current": "tensor", "per-tensor": "tensor", "rowwise": "row", "per-row": "row",
    "blockwise": "block", "deepseek": "block", "rowwise_with_gw_hp": "row",
}  # fmt: skip
MUON_SHARING = ("sharded", "gathered")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a job does beside its plan."""

    scaling: str = ""  # of fp8: one of SCALINGS; empty: as delayed
    muon_steps: int = 5  # Newton-Schulz iterations of each matrix
    muon: str = "sharded"  # each matrix is orthogonalised by one replica; gathered: by all, from gathered gradients
    host_optimizer: float = 0.0  # share of the optimizer's state that is kept, and stepped, on the host
    host_overlap: bool = False  # its transfers run beside the host's step

    @property
    def cast(self) -> CastCost:
        return SCALINGS[self.scaling or "delayed"]


USUAL = Recipe()


def recipe_problems(r: Recipe, precision: str, optimizer: str) -> list[str]:
    """What of a recipe cannot be, in words."""
    out = []
    if r.scaling and r.scaling not in SCALINGS:
        out.append(f"scaling is {r.scaling!r}: choose from {', '.join(SCALINGS)}")
    elif r.scaling and precision != "fp8":
        out.append(
            f"scaling is of precision fp8: {precision} has {'its own' if precision in ('mxfp8', 'nvfp4') else 'none'}"
        )
    if not 1 <= r.muon_steps <= 100:
        out.append(f"muon_steps is 1 to 100: it is {r.muon_steps}")
    if r.muon not in MUON_SHARING:
        out.append(f"muon is {r.muon!r}: choose from {', '.join(MUON_SHARING)}")
    if not 0 <= r.host_optimizer <= 1:
        out.append(f"host_optimizer is a share, 0 to 1: it is {r.host_optimizer:g}")
    if r.host_optimizer and optimizer in ("none", "muon"):
        out.append(f"an optimizer of kind {optimizer} is not stepped on the host: use adam, or host_optimizer = 0")
    return out


def recipe_text(r: Recipe, optimizer: str) -> str:
    """In a few words; nothing where all is as usual."""
    words = [
        f"{r.scaling} scaling" if r.scaling else "",
        f"Muon {r.muon}, {r.muon_steps} steps" if optimizer == "muon" else "",
        f"{r.host_optimizer:.0%} of the optimizer on the host" if r.host_optimizer else "",
    ]
    return ", ".join(w for w in words if w)


def recipe_fields(r: Recipe) -> dict[str, object]:
    """As keys of a [training] table, those that are not as usual."""
    every = {
        "scaling": r.scaling, "muon_steps": r.muon_steps, "muon": r.muon, "host_optimizer": r.host_optimizer,
        "host_overlap": r.host_overlap,
    }  # fmt: skip
    return {k: v for k, v in every.items() if v != getattr(USUAL, k)}
