"""The scratch memory of convolution ops: cuDNN's workspace, and what PyTorch copies for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from presage.costs.call import Call, from_graph
from presage.costs.families.conv import BACKWARD, DEPTHWISE, FORWARD, OPS, TRANSPOSED, Conv, conv
from presage.graph.graph import Graph, Op, Tensor
from presage.hardware import Gpu
from presage.memory import workspace_fp32 as fp32
from presage.memory.workspace_reduce import buffers as reduction_buffers
from presage.memory.workspace_trees import workspaces

ARGUMENTS = 10  # of a backward op, before the mask of wanted gradients


def forward(graph: Graph, op: Op, chip: Gpu) -> tuple[int, ...]:
    """Scratch of a forward convolution."""
    if len(graph.inputs_of(op)) < 2 or not graph.outputs_of(op):
        return ()
    if _tensor_cores(graph, op):
        return _nonzero(workspaces(_run(graph, op), chip)[0])
    x, w = graph.inputs_of(op)[:2]
    return _nonzero(fp32.forward(fp32.shape(x, w, graph.outputs_of(op)[0])))


def backward(graph: Graph, op: Op, chip: Gpu) -> tuple[int, ...]:
    """What is copied first, and the larger of the two gradients' scratch, for they are computed one after the other."""
    if len(graph.inputs_of(op)) < 3:
        return ()
    dy, x, w = graph.inputs_of(op)[:3]
    wants_input, _, wants_bias = _wanted(op)
    if _tensor_cores(graph, op):
        scratch = max(workspaces(_run(graph, op), chip), default=0)
    else:
        s = fp32.shape(x, w, dy)
        scratch = max(fp32.data(s) if wants_input else 0, fp32.weight(s))
    last = fp32.is_last(x) or fp32.is_last(w)
    relaid = 0 if fp32.is_last(dy) == last and _dense(dy) else dy.nbytes
    relaid += x.nbytes if len(x.shape) == 3 and not x.is_contiguous else 0  # so as not to be taken for channels-last
    bias = sum(reduction_buffers(dy.shape, dy.strides, (0, *range(2, len(dy.shape))), chip=chip)) if wants_bias else 0
    return _nonzero(relaid) + _nonzero(scratch) if relaid + scratch >= bias else (bias,)


def look_up(graph: Graph, chip: Gpu) -> None:
    """Find the workspaces of all convolutions of a step at once, which is quicker than one by one."""
    tensors = {name: 3 if name == BACKWARD else 2 for name in OPS}
    ops = [op for op in graph.ops if op.kernels and len(graph.inputs_of(op)) >= tensors.get(op.name, inf)]
    ops = [op for op in ops if _tensor_cores(graph, op)]
    workspaces([c for op in ops for c in _run(graph, op)], chip)


def _run(graph: Graph, op: Op) -> list[Conv]:
    """The convolutions that an op runs: a backward one, one for each gradient."""
    call = _call(graph, op)
    if op.name != BACKWARD:
        return [conv(_plain(call))]
    wants_input, wants_weight, _ = _wanted(op)
    ways = [w for w, wanted in (((True, False), wants_input), ((False, True), wants_weight)) if wanted]
    return [conv(_gradient(call, way)) for way in ways]


def _tensor_cores(graph: Graph, op: Op) -> bool:
    """Half precision, or float32 where TF32 is allowed."""
    itemsize = graph.inputs_of(op)[0].itemsize
    return itemsize == 2 or (itemsize == 4 and bool(graph.flags.get("cudnn.allow_tf32", True)))


def _call(graph: Graph, op: Op) -> Call:
    """The op with its inputs; TF32 is allowed in convolutions unless it is known not to be."""
    return replace(from_graph(graph, op), tf32=bool(graph.flags.get("cudnn.allow_tf32", True)))


def _plain(call: Call) -> Call:
    """A forward convolution as the op that the GPU runs."""
    if call.name in (FORWARD, TRANSPOSED, *DEPTHWISE):
        return call
    x, w, _, stride, padding, dilation, transposed, output_padding, groups = _filled(call.inputs, 9)
    if transposed:
        return replace(call, name=TRANSPOSED, inputs=(x, w, padding, output_padding, stride, dilation, groups))
    if not isinstance(groups, int):
        groups = max(1, x.sizes[1] // max(1, w.sizes[1]))
    return replace(call, name=FORWARD, inputs=(x, w, padding, stride, dilation, groups))


def _gradient(call: Call, way: tuple[bool, bool]) -> Call:
    """A backward call for one of its gradients."""
    given = call.inputs[:-1] if len(call.inputs) <= ARGUMENTS else call.inputs[:ARGUMENTS]
    return replace(call, name=BACKWARD, inputs=(*_filled(given, ARGUMENTS), (*way, False)))


def _filled(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return (*values[:count], *(None,) * (count - len(values)))


def _dense(t: Tensor) -> bool:
    return 0 not in (s for s, n in zip(t.strides, t.shape, strict=True) if n > 1)


def _wanted(op: Op) -> tuple[bool, bool, bool]:
    mask = op.inputs[-1] if op.inputs else None
    if isinstance(mask, list) and len(mask) == 3:
        return bool(mask[0]), bool(mask[1]), bool(mask[2])
    return True, True, False


def _nonzero(n: int) -> tuple[int, ...]:
    return (n,) if n else ()
