"""Batch norm as CUDA picks it: cuDNN's kernels for float32 and float16, PyTorch's own for bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from presage.graph.graph import Op, Ref, Tensor

__all__ = ["fitting"]

FORWARD = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BACKWARD = (
    "grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd", "train", "eps", "output_mask",
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
        empty = replace(op, name="aten::empty", overload="memory_format", inputs=([0], "uint8", None, "cuda:0", False, None),
                        outputs=op.outputs[3:], names=(), writes=(), kernels=False)  # fmt: skip
        yield empty
        yield replace(op, name="aten::native_batch_norm", inputs=op.inputs[:8], outputs=op.outputs[:3], names=FORWARD)
    else:
        x, grad, *rest = op.inputs
        within = tuple(w.replace("CudnnBatchNorm", "NativeBatchNorm") for w in op.within)
        inputs = (grad, x, *rest[:5], True, rest[5], [True, True, True])
        yield replace(op, name="aten::native_batch_norm_backward", inputs=inputs, names=BACKWARD, within=within)
