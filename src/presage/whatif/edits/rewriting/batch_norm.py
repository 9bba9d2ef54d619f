"""Batch norm as CUDA picks it: cuDNN's kernels for float32 and float16, PyTorch's own for bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from msgspec.structs import replace

from presage.graph.arguments import references
from presage.graph.graph import Op, Ref, Tensor
from presage.whatif.edits.memory_layout import is_channels_last
from presage.whatif.edits.rewriting.draft import Draft

__all__ = ["fitting", "semaphores"]

FORWARD = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BACKWARD = (
    "grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd", "train", "eps",
    "output_mask",
)  # fmt: skip


def fitting(op: Op, tensors: Sequence[Tensor]) -> Iterator[Op]:
    """The op, or those that run in its place for the types it is now given."""
    first = op.inputs[0] if op.inputs else None
    if (
        not op.name.startswith("aten::cudnn_batch_norm")
        or not isinstance(first, Ref)
        or tensors[first.id].dtype != "bfloat16"
    ):
        yield op
    elif op.name == "aten::cudnn_batch_norm":
        nothing = ([0], "uint8", None, "cuda:0", False, None)
        empty = replace(op, name="aten::empty", overload="memory_format", inputs=nothing, names=(), kernels=False)
        empty = replace(empty, outputs=op.outputs[3:], writes=())
        yield empty
        yield replace(op, name="aten::native_batch_norm", inputs=op.inputs[:8], outputs=op.outputs[:3], names=FORWARD)
    else:
        x, grad, *rest = op.inputs
        within = tuple(w.replace("CudnnBatchNorm", "NativeBatchNorm") for w in op.within)
        inputs = (grad, x, *rest[:5], True, rest[5], [True, True, True])
        yield replace(op, name="aten::native_batch_norm_backward", inputs=inputs, names=BACKWARD, within=within)


def semaphores(draft: Draft, op: Op, old: Op) -> None:
    """PyTorch's own kernels over channels-last pictures: where several blocks share a channel they meet at semaphores,
    which are cleared first. `old` is the op that this one was made of; what that one had is there already."""
    if not _meets(op, draft.tensors) or _meets(old, draft.graph.tensors):
        return
    forward = op.name == "aten::native_batch_norm"
    x = draft.tensors[list(references(op.inputs))[0 if forward else 1]]
    across, down = _grid(x.elements // x.shape[1], x.shape[1])
    sums = draft.new(((4 if forward else 2) * x.shape[1] * down,), "float32")
    flags = draft.new((across,), "int32")
    inside = replace(op, names=(), writes=(), overload="", within=(*op.within, op.name), kernels=False)
    zeros = (*inside.within, "aten::zeros")
    draft.add(replace(inside, name="aten::empty", inputs=(list(sums.shape),), outputs=(sums.id,)))
    draft.add(replace(inside, name="aten::empty", inputs=([across],), outputs=(flags.id,), within=zeros))
    draft.add(
        replace(
            inside,
            name="aten::fill_",
            overload="Scalar",
            inputs=(Ref(flags.id), 0),
            outputs=(flags.id,),
            writes=(flags.id,),
            within=(*zeros, "aten::zero_"),
            kernels=True,
        )
    )


def _meets(op: Op, tensors: Sequence[Tensor]) -> bool:
    if op.name not in ("aten::native_batch_norm", "aten::native_batch_norm_backward"):
        return False
    forward = op.name == "aten::native_batch_norm"
    x = tensors[list(references(op.inputs))[0 if forward else 1]]
    trains = op.inputs[5 if forward else 7]
    return bool(trains) and is_channels_last(x) and _grid(x.elements // x.shape[1], x.shape[1])[1] > 1


def _grid(rows: int, channels: int) -> tuple[int, int]:
    """Blocks of the channels-last kernels' reductions, over channels and over rows."""
    x = min(_power(channels), 32)
    y = min(_power(ceil(rows / 16)), 512 // x)
    if x * y != 512:
        x = min(_power(channels), 512 // y)
    blocks = min(ceil(rows / (y * 16)), 128)
    return ceil(channels / x), 1 if blocks < 8 else blocks


def _power(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (max(n, 1).bit_length() - 1)
