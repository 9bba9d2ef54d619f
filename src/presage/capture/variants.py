"""Variants: changes that are made around a training step while it is captured, its code as it is.

    capture(build, variant=Variant(autocast="bfloat16", optimizer="fused"))

The step then runs as if its author had made the change; `Variant` is the value, `variant_hooks` makes the change.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from presage.errors import PresageError


class NotApplicable(PresageError):
    """A change that the step has no place for; its text says what was looked for."""


@dataclass(frozen=True)
class Variant:
    """What is done to a step while it is captured. The default changes nothing; `a | b` is a, then b."""

    autocast: str = ""  # torch.autocast around the forward pass, with this dtype
    dtype: str = ""  # model and inputs in this dtype, the code's own autocast switched off
    tf32: bool = False  # TF32 for float32 products and convolutions
    channels_last: bool = False  # 4-D weights and inputs in the channels_last memory format
    optimizer: str = ""  # 'fused' or 'foreach'
    capturable: bool = False  # optimizers with capturable=True, as CUDA graphs need it
    fused_attention: bool = False  # softmax(q @ k.T) @ v as scaled_dot_product_attention
    checkpoint: str | None = None  # modules to checkpoint, by a regular expression; '' for repeated blocks
    accumulate: int = 1  # microbatches: forward and backward passes for each optimizer step
    traced: bool = False  # as the code runs while a CUDA graph is captured or a compiler traces it
    gpu: str = "h200"  # the GPU that the code sees, and asks about itself
    ranks: int = 1  # processes that the code sees, as torchrun starts them
    rank: int = 0  # which of them it is
    per_node: int = 8  # GPUs of a node

    def __or__(self, other: Variant) -> Variant:
        both = replace(self, **other.changes())
        return replace(both, accumulate=self.accumulate * other.accumulate)

    def __bool__(self) -> bool:
        return bool(self.changes())

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes().items())

    @property
    def place(self) -> tuple[int, int, int]:
        """The rank that the code runs as, of how many, and how many there are to a node."""
        return self.rank, self.ranks, self.per_node

    def changes(self) -> dict[str, Any]:
        """The fields that are not as by default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


AS_WRITTEN = Variant()
