"""Captures: a training step, run without a GPU, as a Graph."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture import rules_index, rules_layers, rules_math, rules_memory, streams
from presage.capture.assumptions import Assumptions
from presage.capture.call_sites import Nested, Profile, entering_threads
from presage.capture.calls import MemoryEvent, RecordedCall
from presage.capture.compiled import compile_notes
from presage.capture.custom_ops import slow_paths, unpriced_note
from presage.capture.fake_device import Devices, fake_cuda, patched, restore_settings, torch_flags
from presage.capture.iterations import all_iterations
from presage.capture.lowering import HOST, CallLowering, Rule, check_complete
from presage.capture.process_groups import ProcessGroups
from presage.capture.rank_objects import with_senders
from presage.capture.recorder import Recorder
from presage.capture.recording import Step, recorded_step, users
from presage.capture.script_files import CheckpointFiles
from presage.capture.variant_hooks import VariantHooks, hooked
from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import PresageError
from presage.fusing.inductor import as_compiled
from presage.graph.graph import Event, Graph, Op

RARELY = 50_000  # objects made between two garbage collections


@with_senders
def capture(
    function: Callable[..., Step],
    arguments: dict[str, Any] | None = None,
    *,
    source: str = "",
    warm_up: int = 1,
    variant: Variant = AS_WRITTEN,
    assume: Mapping[str, str] | None = None,
) -> Graph:
    """One training step as it would run on a GPU (`variant.gpu`).

    `function(device, **arguments)` builds the model on `device` and returns a callable that runs one step. It is built
    once, run `warm_up` times (optimizers make their state on the first step), and once more for the record. `variant`:
    changes to make around it, such as autocast or another optimizer. `assume`: what to take unknown values for that the
    code reads, by their lines, {"train.py:41": "true"}.
    """
    arguments = arguments or {}
    with on_fake_gpu(lambda: Recorder(Assumptions(assume)), variant) as (recorder, hooks):
        step = users(recorder, lambda: hooks.wrapped(_checked(function("cuda", **arguments), source or function)))
        recorder.assumptions.built()
        warm_up += bool(recorder.groups.made)  # DDP lays its buckets anew after the first step
        taken = recorded_step(recorder, step, warm_up)
        flags = torch_flags()
    graph = graph_of(recorder, taken.profile, source, arguments, flags, taken.steady)
    graph = replace(graph, variant=variant.changes(), largest=taken.largest)
    check_on_gpu(graph, source or "the step", "build the model and its inputs on the device that FUNCTION is given")
    return graph


def check_on_gpu(graph: Graph, source: str, remedy: str) -> None:
    """Raise an error where a step runs nothing on the GPU."""
    if not any(op.kernels for op in graph.ops):
        raise PresageError(f"{source}: the step ran on the CPU: nothing to predict; {remedy}")


R = TypeVar("R", bound=Recorder)


@contextmanager
def on_fake_gpu(kind: Callable[[], R], variant: Variant) -> Iterator[tuple[R, VariantHooks]]:
    """Code that runs inside sees a GPU, with the changes of a variant; a recorder of this kind sees its ops."""
    streams.restart()
    groups = ProcessGroups(*variant.place)
    # autograd's own threads know only the devices that were there when the process first ran a backward
    with (
        restore_settings(),
        _frozen_heap(),
        fake_cuda(variant.gpu, groups) as answers,
        torch.autograd.set_multithreading_enabled(False),
        CheckpointFiles().in_memory(),
    ):
        recorder = kind()  # which loads PyTorch's compiler, unless there is a fake GPU already
        answers.memory, recorder.capacity = recorder.memory, answers.total
        recorder.groups = groups
        reading = patched(FakeTensor, "item", recorder.assumptions.remembering(torch.Tensor.item))
        arrays = patched(FakeTensor, "numpy", lambda tensor, **options: recorder.reads.numpy(tensor, **options))
        threads = entering_threads(recorder, Devices)
        iterations = patched(torch.optim.LBFGS, "step", all_iterations(recorder.note))
        resizing = patched(torch.UntypedStorage, "resize_", _resizing(recorder))
        work: Any = getattr(torch.distributed, "Work", None)
        waits = patched(work, "wait", recorder.communicators.waiting(work.wait)) if work else nullcontext()
        with ExitStack() as patches:
            for patch in (reading, arrays, resizing, waits, iterations, recorder.places.following(), threads):
                patches.enter_context(patch)
            with recorder, hooked(variant) as hooks:
                yield recorder, hooks


def _resizing(recorder: Recorder) -> Callable[[Any, int], Any]:
    resize: Any = torch.UntypedStorage.resize_

    def run(storage: Any, nbytes: int) -> Any:
        out = resize(storage, nbytes)
        recorder.memory.resized(storage)
        return out

    return run


class _Heap:
    """Whether others keep objects out of garbage collections: once seen, not asked again, since Python counts them one
    by one, 0.1 s for six million."""

    frozen_by_others = False
    captures = 0  # that go on, one in another


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep what was loaded before the capture (torch itself, mostly) out of garbage collections during it, which are
    rare: every op leaves objects that stay to the end."""
    if not _Heap.captures and not _Heap.frozen_by_others:
        _Heap.frozen_by_others = gc.get_freeze_count() > 0
    _Heap.captures += 1
    threshold = gc.get_threshold()
    gc.freeze()
    if threshold[0]:
        gc.set_threshold(RARELY, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        _Heap.captures -= 1
        if not _Heap.captures and not _Heap.frozen_by_others:
            gc.unfreeze()


def _checked(step: Any, source: Any) -> Step:
    """What the user's function returned, if it can be run as a step."""
    if isinstance(step, torch.nn.Module):
        what = f"the model ({type(step).__name__})"
        raise PresageError(f"{source}: it returned {what}: return a function that runs one training step with it")
    if not callable(step):
        raise PresageError(f"{source}: it must return a callable that runs one step, not {step!r}")
    return step  # type: ignore[no-any-return]


def graph_of(
    recorder: Recorder,
    profile: Profile,
    source: str,
    arguments: dict[str, Any],
    flags: dict[str, bool | str],
    steady: bool = True,
) -> Graph:
    """The recorded step as a graph."""
    made, storages, moments = recorder.memory.compact(_homes(recorder))
    lowering = CallLowering(made, storages, recorder.memory.sparse, recorder.shadows.facts())
    lowering.notes += recorder.notes
    assumptions, hanging = recorder.assumptions.found(steady, len(recorder.calls))
    lowering.hanging = _with_backward(hanging, recorder.calls)
    starts = _lower_all(lowering, recorder, profile.nested, moments)
    lowering.notes += [*unpriced_note(recorder.unpriced), *slow_paths(recorder.places.roots)]
    lowering.notes += compile_notes(c.compiled for c in recorder.calls)
    if recorder.groups.made and recorder.groups.ranks == 1:
        lowering.notes += ["the code communicates, here as the only rank: give --ranks N to see it as one of several"]
    graph = lowering.finish(
        _frees(moments, starts, len(lowering.ops)),
        source=source,
        arguments={k: str(v) for k, v in arguments.items()},
        flags=flags,
        torch=torch.__version__,
        assumptions=assumptions,
        groups=recorder.communicators.used(),
        ranks=recorder.communicators.alike(),
    )
    check_complete(graph, recorder.calls, {n.call for n in profile.nested})
    return as_compiled(replace(graph, notes=(*_missing(graph), *graph.notes)))


def _missing(graph: Graph) -> Iterator[str]:
    """What a training step has and this one does not."""
    phases = {op.phase for op in graph.ops if op.kernels or op.phase == "backward"}
    if "backward" not in phases:
        yield "the step has no backward pass on the GPU"
    if "optimizer" not in phases:
        yield "the step has no optimizer on the GPU"


def _with_backward(hanging: dict[int, tuple[int, ...]], calls: list[RecordedCall]) -> dict[int, tuple[int, ...]]:
    """The calls that hang on assumptions, with those of their backward passes."""
    forward = {calls[i].sequence: numbers for i, numbers in hanging.items() if calls[i].phase == "forward"}
    forward.pop(-1, None)
    backward = {c.index: forward[c.sequence] for c in calls if c.phase == "backward" and c.sequence in forward}
    return backward | hanging


def _homes(recorder: Recorder) -> dict[int, str]:
    """The module in which each storage was made."""
    calls = recorder.calls
    return {
        m.storage: calls[m.call].module for m in recorder.memory.moments if m.allocates and 0 <= m.call < len(calls)
    }


def _lower_all(
    lowering: CallLowering, recorder: Recorder, nested: list[Nested], moments: list[MemoryEvent]
) -> list[int]:
    """Lower every call in order; returns the number of the first op of each call."""
    allocated: dict[int, list[int]] = defaultdict(list)
    for m in moments:
        if m.allocates:
            allocated[m.call].append(m.storage)
    starts: list[int] = []
    for n in nested:
        if n.call < 0:
            lowering.append(_host_event(n, recorder, len(starts)))
            continue
        call = recorder.calls[n.call]
        starts.append(len(lowering.ops))
        if call.name == "aten::detach" and (not n.within or n.within[-1] not in ("aten::detach", "detach")):
            continue  # autograd detaches what it saves only where tensors are subclasses, as fake ones are
        within = n.within[:-1] if n.within and n.within[-1] in (call.name, call.called) else n.within
        if n.sequence >= 0:
            call.sequence = n.sequence
        lowering.begin(call, within, allocated[n.call])
        lower(lowering, call)
        lowering.end()
    return starts


def _host_event(n: Nested, recorder: Recorder, call: int) -> Op:
    """An op that never reached a device: it belongs where its neighbour in time does."""
    near = recorder.calls[min(call, len(recorder.calls) - 1)]
    place = near.phase, near.thread, near.module, n.within
    return Op(n.name, "", (), (), *place, kernels=False, line=near.line, compiled=near.compiled)


def _frees(moments: list[MemoryEvent], starts: list[int], end: int) -> list[Event]:
    out = []
    for m in moments:
        if not m.allocates:
            out.append(Event(starts[m.call] if m.call < len(starts) else end, m.storage, False))
    return out


# ---- Which ops CUDA's code for an op runs, by the op's name. An op without a rule is its own single leaf.

RULES: dict[str, Rule] = (
    rules_memory.RULES | rules_math.RULES | rules_layers.RULES | rules_index.RULES | rules_memory.FOREACH_RULES
)


def lower(builder: CallLowering, call: RecordedCall) -> None:
    """Add the ops of one call."""
    if call.host:
        builder.same(kernels=False)
        return
    rule = RULES.get(call.name)
    if rule is not None and not call.opaque and call.called:  # else it was recorded as the kernel it is
        rule(builder, call)
    else:
        builder.same(kernels=not call.view and call.name not in HOST)
