"""Types of numbers: what an op's results are, given what its inputs are now and what all were before."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FLOATS", "FOLLOWED", "KEPT", "LOW", "promoted"]

LOW = ("bfloat16", "float16")
FLOATS = (*LOW, "float32", "float64")
_WIDTH = {"bfloat16": 0, "float16": 0, "float32": 1, "float64": 2}

# Outputs that are float32 whatever the inputs: statistics of rows.
KEPT: dict[str, tuple[int, ...]] = {
    "aten::native_layer_norm": (1, 2),
    "aten::_fused_rms_norm": (1,),
    "aten::native_batch_norm": (1, 2),
    "aten::cudnn_batch_norm": (1, 2),
    "aten::_cudnn_attention_forward": (1,),
    "aten::_efficient_attention_forward": (1,),
    "aten::_flash_attention_forward": (1,),
}
# Which input an output has its type from, for ops that mix them.
_LAYER = {0: 0, 1: 5, 2: 5}
FOLLOWED: dict[str, dict[int, int]] = {
    "aten::native_layer_norm": {0: 0},
    "aten::native_batch_norm": {0: 0},
    "aten::cudnn_batch_norm": {0: 0},
    "aten::native_layer_norm_backward": _LAYER,
    "aten::native_batch_norm_backward": {0: 0, 1: 2, 2: 2},
    "aten::cudnn_batch_norm_backward": {0: 0, 1: 2, 2: 2},
    "aten::native_group_norm_backward": {0: 0, 1: 4, 2: 4},
}


def promoted(dtypes: Sequence[tuple[str, bool]]) -> str:
    """The type of an elementwise result; each input with whether it is a mere number in a tensor, which gives way."""
    floats = [d for d, scalar in dtypes if d in FLOATS and not scalar] or [d for d, _ in dtypes if d in FLOATS]
    if not floats:
        return ""
    widest = max(floats, key=_WIDTH.__getitem__)
    return "float32" if _WIDTH[widest] == 0 and len(set(floats)) > 1 else widest
