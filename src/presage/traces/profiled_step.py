"""One step of a Kineto trace that was recorded with shapes, as an execution graph.

The profiler says which kernels an op launched and how long they took, but it names no tensor and has no results: these
follow from the inputs (`output_rules`), and each mention of a tensor is one of its own.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.costs.rates import REACHED_BANDWIDTH
from presage.errors import InputError, PresageError
from presage.graph.dtypes import DTYPES
from presage.graph.families import family
from presage.graph.graph import DTYPE_BYTES, OpCost
from presage.hardware import gpu
from presage.traces import kineto
from presage.traces.execution_graph import (
    Argument,
    ExecutionGraph,
    ExecutionNode,
    TensorRef,
    check_count,
    ordered_graph,
    tensors,
)
from presage.traces.execution_trace import BACKWARD
from presage.traces.likely_tensors import LikelyTensors
from presage.traces.output_rules import broadcast, new_tensor, results, with_indices
from presage.traces.profiled_arguments import LISTS, Event, ProfiledArguments
from presage.traces.trace import GpuKind, HostKind, Trace
from presage.traces.traced_groups import COMMS, KINDS
from presage.traces.traced_ops import is_op

SHAPES = "was recorded without shapes: record it with torch.profiler.profile(record_shapes=True)"
ACCUMULATE, UPDATE = "torch::autograd::AccumulateGrad", "Optimizer.step#"
SYNCS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
RECORDED = "recorded"  # the attribute with what an op's kernels took
UNTOLD = "kernel::"  # stands before the name of a kernel that no op launched
ELEMENT = {**DTYPES, "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
           "Byte": "uint8", "Char": "int8", "Bool": "bool", "Double": "float64"}  # fmt: skip
NAMED = (("AllReduce", "allreduce"), ("ReduceScatter", "_reduce_scatter_base"), ("AllGather", "_allgather_base"),
         ("Broadcast", "broadcast"), ("SendRecv", "all_to_all"), ("Reduce", "reduce"))  # fmt: skip
TF32 = {"matrix multiply": "allow_tf32", "convolution": "cudnn.allow_tf32"}
IN_TF32, COULD_TF32 = re.compile(r"tf32|s1688"), re.compile(r"sm(8|9|10|12)\d|_(8|9|10|12)0_")  # of kernels


@dataclass
class _Work:
    """What an event of the host put on the GPU itself."""

    seconds: float = 0.0
    kernels: list[int] = field(default_factory=list)  # places among the GPU's events


class ProfiledStep:
    """Reads a step of a trace; `graph` is what it found, `assumed` names ops whose results no rule tells."""

    def __init__(self, path: str | Path) -> None:
        self.trace = trace = kineto.read(path, ignore=["*"], arguments=True)
        self.path = str(path)
        self._check()
        self.begin, self.end = _window(trace)
        host = trace.host
        self.inside = (host.start >= self.begin) & (host.start < self.end)
        self.frame = host.innermost(host.kind != HostKind.CALL)
        self.names = [trace.names[n] for n in host.name]
        self.arguments = ProfiledArguments(trace, self.names)
        self.work, self.talks = self._work()
        self.gradients = self._gradients()  # by autograd's number: the gradient of what the forward op made
        self.parameters = [t for i in self._named(ACCUMULATE) for t in tensors(self.arguments.of(i))]
        self.arguments.parameters = self.parameters
        self.likely = LikelyTensors(self.parameters)
        self.forward, self.backward = self._autograd()
        self.arguments.lists = self._list_parts()
        self.assumed: dict[str, float] = defaultdict(float)  # seconds by op
        self.measured = self.untold = 0.0  # seconds of all kernels, and of those that only their time is known of
        self.rate = _bandwidth(trace)
        self.graph = self._graph()

    def _check(self) -> None:
        if self.trace.cpu_only or not len(self.trace.gpu):
            raise InputError(self.path, "has no kernel of a GPU: record it with ProfilerActivity.CUDA")
        ops = self.trace.host.kind == HostKind.OP
        if not (self.trace.host.dims[ops] >= 0).any():
            raise InputError(self.path, SHAPES)

    # ---- what launched what

    def _work(self) -> tuple[dict[Event, _Work], list[int]]:
        """The work of each event of the host; and the collectives, as places among the GPU's events."""
        found: dict[Event, _Work] = defaultdict(_Work)
        talks, gpu = [], self.trace.gpu
        for k in np.flatnonzero(gpu.launch >= 0).tolist():
            call = int(gpu.launch[k])
            if not self.inside[call]:
                continue
            if self.trace.is_collective[k]:
                talks.append(k)
                continue
            owner = int(self.frame[call])
            one = found[owner if owner >= 0 else call]
            one.seconds += float(gpu.end[k] - gpu.start[k]) * 1e-9
            one.kernels.append(k)
        return dict(found), talks

    def _named(self, name: str) -> Iterator[Event]:
        return (i for i in np.flatnonzero(self.inside).tolist() if self.names[i] == name)

    def _gradients(self) -> dict[int, TensorRef]:
        out: dict[int, TensorRef] = {}
        host = self.trace.host
        for i in np.flatnonzero((host.sequence >= 0) & (host.dims >= 0) & self.inside).tolist():
            if "Backward" in self.names[i] and "::" not in self.names[i]:
                given = [t for t in tensors(self.arguments.of(i)) if t.dtype in DTYPE_BYTES]
                if given:
                    out[int(host.sequence[i])] = given[0]
        return out

    def _autograd(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each event autograd's number if it is of the forward pass, and if of the backward pass; else -1."""
        host = self.trace.host
        around = host.innermost(host.sequence >= 0)
        number = np.where(around >= 0, host.sequence[around], -1)
        back = np.array(["Backward" in n or n.startswith(BACKWARD) for n in self.trace.names])[host.name[around]]
        return np.where(back, -1, number), np.where(back, number, -1)

    def _list_parts(self) -> dict[Event, list[TensorRef]]:
        """For ops of an update whose lists the trace leaves out, the parameters that they take to be about.

        An optimizer calls its ops for each group of parameters: the op it calls least often tells how many there are.
        """
        updates = [i for i in np.flatnonzero(self.inside).tolist() if self.names[i].startswith(UPDATE)]
        host = self.trace.host
        spans = [(host.start[i], host.end[i]) for i in updates]
        calls: dict[str, list[Event]] = defaultdict(list)
        for i in np.flatnonzero(self.inside & (host.kind == HostKind.OP)).tolist():
            if self.names[i].startswith(LISTS) and i in self.work and any(a <= host.start[i] < b for a, b in spans):
                calls[self.names[i]].append(i)
        groups = min((len(c) for c in calls.values()), default=1)
        return {
            i: self.parameters[place * groups // len(found) :: groups]
            for found in calls.values()
            for place, i in enumerate(found)
        }

    # ---- nodes

    def _graph(self) -> ExecutionGraph:
        host = self.trace.host
        kept = np.flatnonzero(self.inside & (host.kind != HostKind.CALL))
        check_count(self.path, len(kept))
        kept = kept[np.lexsort((-host.end[kept], host.start[kept]))].tolist()
        waits = self._waits()
        nodes = [self._node(i, i in waits) for i in kept]
        nodes += [self._untold(i) for i in self.work if not self._shows(i)]
        nodes += [self._collective(k) for k in self.talks]
        nodes += self._awaited()
        known = {node.id for node in nodes}
        nodes = [n if n.parent in known else replace(n, parent=None) for n in nodes]
        origin = int(host.start.min())
        nodes = [replace(n, start_us=(n.start_us or 0.0) - origin / 1e3) for n in nodes]
        return replace(
            ordered_graph(self.path, "kineto", nodes, self.trace.rank),
            held=frozenset(t.storage for t in self.parameters),
        )

    def _shows(self, event: Event) -> bool:
        """Whether an event with kernels is that of an op."""
        return self.trace.host.kind[event] == HostKind.OP and is_op(ExecutionNode(0, self.names[event]))

    def _waits(self) -> set[Event]:
        """The ops in which the host waits for the GPU."""
        host = self.trace.host
        calls = np.flatnonzero(self.inside & (host.kind == HostKind.CALL)).tolist()
        return {int(self.frame[i]) for i in calls if self.names[i].endswith(SYNCS)} - {-1}

    def _node(self, event: Event, sync: bool) -> ExecutionNode:
        host, name, work = self.trace.host, self.names[event], self.work.get(event)
        op = host.kind[event] == HostKind.OP
        frame = self._frame(event, name)
        if not op or not is_op(frame):
            return frame
        inputs = self.arguments.of(event)
        outputs: tuple[Argument, ...] = ()
        attrs: dict[str, Any] = {"kernels": work is not None, "sync": sync}
        if work is not None:
            inputs = self.likely.inputs(self._placed(inputs, work), int(self.backward[event]))
            outputs = self._outputs(event, name, inputs, work.seconds)
            if not outputs:
                attrs |= self._cost(work)
            inputs = with_indices(name, inputs, outputs)
            self.likely.note(inputs, outputs, int(self.forward[event]))
            attrs[RECORDED] = OpCost(seconds=work.seconds, launches=len(work.kernels))
            self.measured += work.seconds
        return replace(frame, inputs=inputs, outputs=outputs, attrs=attrs)

    def _frame(self, event: Event, name: str) -> ExecutionNode:
        host = self.trace.host
        parent = int(host.parent[event])
        sequence = int(host.sequence[event])
        return ExecutionNode(
            id=event + 1,
            name=name,
            kind="op" if host.kind[event] == HostKind.OP else "annotation",
            parent=int(self.frame[parent]) + 1 if parent >= 0 and self.frame[parent] >= 0 else None,
            thread=int(host.thread[event]),
            sequence=sequence if sequence >= 0 else None,
            start_us=int(host.start[event]) / 1e3,
            duration_us=int(host.end[event] - host.start[event]) / 1e3,
        )

    def _placed(self, inputs: tuple[Argument, ...], work: _Work) -> tuple[Argument, ...]:
        """The inputs, those of a copy between host and GPU where they are."""
        gpu, names = self.trace.gpu, [self.trace.gpu_name(k) for k in work.kernels]
        if any(gpu.kind[k] != GpuKind.MEMCPY for k in work.kernels):
            return inputs
        there = 1 if any("HtoD" in n for n in names) else 0 if any("DtoH" in n for n in names) else -1
        return tuple(
            replace(a, device="cpu") if i == there and isinstance(a, TensorRef) else a for i, a in enumerate(inputs)
        )

    def _outputs(self, event: Event, name: str, inputs: tuple[Argument, ...], seconds: float) -> tuple[Argument, ...]:
        """What an op makes or changes; nothing where no rule tells and it is of an extension."""
        if name.endswith("_") and name.startswith("aten::"):
            return inputs[:1] if any(t.elements for t in tensors(inputs[:1])) else ()
        made = results(name, inputs)
        if made is None and not name.startswith("aten::"):
            return ()
        if made is None:
            gradient = self.gradients.get(int(self.trace.host.sequence[event]))
            made = [gradient] if gradient is not None else broadcast(tensors(inputs))
            if gradient is None and made and family(name) not in ("elementwise", "random"):
                self.assumed[name] += seconds
        fresh = tuple(self.arguments.fresh(t) for t in made)
        self.arguments.dtypes.update((t.shape, t.dtype) for t in fresh)
        return fresh

    def _untold(self, event: Event) -> ExecutionNode:
        """An op for kernels that none launched: of a compiler, of an extension, or launched by the code itself."""
        host, work = self.trace.host, self.work[event]
        longest = max(work.kernels, key=lambda k: self.trace.gpu.end[k] - self.trace.gpu.start[k])
        name = self.names[event] if host.kind[event] == HostKind.OP else _short(self.trace.gpu_name(longest))
        self.measured += work.seconds
        recorded = OpCost(seconds=work.seconds, launches=len(work.kernels))
        attrs = {"kernels": True, RECORDED: recorded, "opaque": True, **self._cost(work)}
        parent = event + 1 if host.kind[event] != HostKind.CALL else None
        frame = replace(self._frame(event, f"{UNTOLD}{name}"), id=len(host) + event + 1, kind="op", parent=parent)
        return replace(frame, inputs=self.arguments.of(event), attrs=attrs)

    def _cost(self, work: _Work) -> dict[str, OpCost]:
        """What kernels cost of which the trace tells the time alone: the bytes that its GPU can move in that time."""
        self.untold += work.seconds
        if self.rate is None:
            return {"cost": OpCost(seconds=work.seconds, launches=len(work.kernels))}
        return {"cost": OpCost(bytes=work.seconds * self.rate, launches=len(work.kernels))}

    def _collective(self, k: int) -> ExecutionNode:
        """A collective, as an execution trace has it."""
        trace, host = self.trace, self.trace.host
        call = int(trace.gpu.launch[k])
        said, kernel = trace.collectives.get(k), trace.gpu_name(k)
        name = said.name if said is not None else next((n for part, n in NAMED if part in kernel), "allreduce")
        tensor = self._exchanged(call, said)
        ranks = _ranks(said.ranks) if said is not None else ()
        size = len(ranks) or (said.group_size if said is not None else 0) or trace.world or 0
        group = (said.group if said is not None else "") or "default"
        into: tuple[Argument, ...] = ()
        if said is not None and said.out_elements != said.in_elements and said.out_elements > 0:
            into = (self.arguments.fresh(new_tensor(tensor, (said.out_elements,))),)
        recorded = OpCost(seconds=float(trace.gpu.end[k] - trace.gpu.start[k]) * 1e-9)
        attrs = {"ranks": " ".join(map(str, ranks)), RECORDED: recorded}
        frame, owner = self._frame(call, COMMS), int(self.frame[call])
        known = name if name in KINDS else "allreduce"
        inputs: tuple[Argument, ...] = (tensor, k + 1, (group,), 0, known, (), (), -1, 1, size)
        node = replace(frame, id=2 * len(host) + k + 1, kind="op", parent=owner + 1 if owner >= 0 else None)
        return replace(node, inputs=inputs, outputs=into, attrs=attrs)

    def _awaited(self) -> Iterator[ExecutionNode]:
        """Where kernels wait for collectives: a stream is made to wait before each one starts, for its data, and again
        for its end. What was started first is awaited first."""
        host, launched = self.trace.host, {int(self.trace.gpu.launch[k]): k for k in self.talks}
        waits = np.array([n.endswith("StreamWaitEvent") for n in self.trace.names])[host.name] & self.inside
        waits[list(launched)] = True
        calls = np.flatnonzero(waits)
        before: list[Event] = []
        begun: list[int] = []
        for call in [*calls[np.argsort(host.start[calls], kind="stable")].tolist(), -1]:
            if call >= 0 and call not in launched:
                before.append(call)
                continue
            ends = before if call < 0 else before[:-1]
            for wait, k in zip(ends, begun, strict=False):
                frame, owner = self._frame(wait, COMMS), int(self.frame[wait])
                number = 2 * len(host) + len(self.trace.gpu) + wait + 1
                inputs: tuple[Argument, ...] = (k + 1, ("",), 0, "wait")
                yield replace(frame, id=number, kind="op", parent=owner + 1 if owner >= 0 else None, inputs=inputs)
            del begun[: len(ends)]
            before = []
            if call >= 0:
                begun.append(launched[call])

    def _exchanged(self, call: Event, said: Any) -> TensorRef:
        if said is not None and said.in_elements > 0:
            return self.arguments.tensor([said.in_elements], ELEMENT.get(said.dtype, "float32"), None)
        around = int(self.frame[call])
        while around >= 0:
            given = [t for t in tensors(self.arguments.of(around)) if t.elements]
            if given:
                return self.arguments.tensor([sum(t.elements for t in given)], given[0].dtype, None)
            up = int(self.trace.host.parent[around])
            around = int(self.frame[up]) if up >= 0 else -1
        return self.arguments.tensor([1], "float32", None)

    def settings(self) -> dict[str, bool]:
        """Whether float32 work used TF32, where the names of kernels tell."""
        seen: dict[str, list[str]] = defaultdict(list)
        for event, work in self.work.items():
            about = TF32.get(family(self.names[event]))
            if about and any(t.dtype == "float32" for t in tensors(self.arguments.of(event))):
                seen[about] += map(self.trace.gpu_name, work.kernels)
        uses = {about: any(IN_TF32.search(n) for n in names) for about, names in seen.items()}
        return {k: used for k, used in uses.items() if used or any(COULD_TF32.search(n) for n in seen[k])}

    def notes(self) -> list[str]:
        """What the trace does not hold and was inferred."""
        out = [
            "from a profiler's trace, which names no tensor: memory is not known, results follow from inputs by rule"
        ]
        if assumed := sum(self.assumed.values()):
            most = ", ".join(sorted(self.assumed, key=lambda name: -self.assumed[name])[:3])
            share = f"{self._share(assumed)} of the GPU time of the trace"
            out.append(f"no rule tells the results of ops with {share}, taken to be elementwise: {most}")
        if self.untold:
            how = "scaled by memory bandwidth" if self.rate else "as the trace does not name a known GPU"
            share = f"{self._share(self.untold)} of the GPU time"
            out.append(f"kernels of extensions and compilers, {share}, take what they took in the trace, {how}")
        return out

    def _share(self, seconds: float) -> str:
        return f"{min(100.0, 100 * seconds / max(self.measured, 1e-12)):.3g}%"


def recorded_of(node: ExecutionNode) -> OpCost | None:
    """What an op's kernels took, of a node of a profiler's trace."""
    found = node.attrs.get(RECORDED)
    return found if isinstance(found, OpCost) else None


def _bandwidth(trace: Trace) -> float | None:
    """Bytes per second that streaming kernels reach on the GPU of the trace, where it is known."""
    used = max(0, next((s.device for s in trace.streams), 0))
    try:
        return REACHED_BANDWIDTH * gpu(trace.gpus[min(used, len(trace.gpus) - 1)]).memory_bandwidth
    except (PresageError, IndexError):
        return None


def _window(trace: Trace) -> tuple[int, int]:
    """The last step with an update in it, else the last step, else all."""
    first, last = trace.span
    if not trace.steps:
        return first, last + 1
    updates = [n.startswith(UPDATE) for n in trace.names]
    starts = trace.host.start[np.array(updates)[trace.host.name]]
    whole = [s for s in trace.steps if ((starts >= s.start) & (starts < s.end)).any()]
    chosen = (whole or trace.steps)[-1]
    return chosen.start, chosen.end


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks in '[0, 1, 2]'; none where the profiler cut a long list short."""
    try:
        found = json.loads(text)
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, list) and all(type(r) is int and r >= 0 for r in found) else ()


def _short(kernel: str) -> str:
    """'vectorized_elementwise_kernel' of 'void at::native::vectorized_elementwise_kernel<4, ...>(...)'."""
    return kernel.split("<")[0].split("(")[0].split("::")[-1].split(" ")[-1] or "unnamed"
