"""Runs a step's ops without running them, and keeps what each was called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock, get_ident
from time import sleep
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from presage.capture.assumptions import Assumptions
from presage.capture.backend import CUDA, listeners, stand_in
from presage.capture.call_sites import CallSites, expects_out_of_memory
from presage.capture.calls import MemoryTracker, RecordedCall
from presage.capture.communicators import NAMESPACES, Communicators
from presage.capture.contents import is_made_of_tensors, is_pinned, leaves, mapped, parts, pin, tensors_in, unprofiled
from presage.capture.custom_ops import KNOWN, is_priced_by_bytes, no_outputs, registered, same_as
from presage.capture.fake_outputs import OUTCOMES, as_on_cuda, as_on_plain_tensors, has_outcome
from presage.capture.host_reads import HostReads
from presage.capture.op_schema import (
    REAL_ELEMENTS,
    explained,
    is_large_factory,
    is_real,
    led_to_cuda,
    mark,
    on_gpu,
    ops_instead,
    signature_of,
)
from presage.capture.output_memo import OutputMemo
from presage.capture.process_groups import ProcessGroups
from presage.capture.streams import FakeCudaGraph
from presage.capture.tensor_values import TensorValues
from presage.capture.typical_step import StepWork
from presage.graph.graph import Arg, OpCost, Ref

aten = torch.ops.aten
SETTLING = 100  # times 50 ms that other threads are waited for
_device_of, _scalar = torch.ops.prim.device.default, aten._local_scalar_dense.default
_copies = (aten._to_copy.default, aten.copy_.default)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every op of PyTorch comes by here, after autocast and autograd have had their turn.

    Ops on the GPU run on fake tensors; ops on small host tensors run for real, so that code that looks at its own
    numbers (samplers, schedules, step counts) works.
    """

    def __init__(self, assumptions: Assumptions | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumptions = assumptions or Assumptions()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.memo = OutputMemo(self.fake)
        self.recording = False
        self.calls: list[RecordedCall] = []
        self.memory = MemoryTracker()
        self.places = CallSites()
        self.notes: dict[str, None] = {}
        self.failure: Exception | None = None  # what went wrong on autograd's thread
        self.shadows = TensorValues()
        self.reads = HostReads(self.fake, self.shadows, self.assumptions, self.places)
        self.elsewhere = 0  # ops that other threads than the main one ran
        self.capacity = 1 << 62  # bytes of the GPU's memory
        self._too_large = False  # more than that was allocated
        self.ended = False  # the capture is over: threads that were started in it end
        self._one_at_a_time, self._owner = RLock(), get_ident()
        self._hash, self._ops, self._elements = 0, 0, 0
        self._seen_from_cpp = {CUDA: stand_in()}
        self.tape: FakeCudaGraph | None = None  # the CUDA graph that is being captured
        self.graph_numbers = count(1)
        self.speed = 1.0  # of the kernels that are recorded now, against those known by their names
        self.unpriced: dict[str, None] = {}  # custom kernels whose cost nobody says
        self.groups, self.communicators = ProcessGroups(), Communicators(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a capture, and what would switch the compiler off is slow

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The stretch of the run that becomes the graph, in the place of one before."""
        self.recording = self.reads.recording = True
        for kept in (self.calls, self.notes, self.unpriced):
            kept.clear()
        self.shadows.forget()
        self.communicators.restart()
        self.assumptions.begin()
        self.memory.start(lambda: len(self.calls))
        listeners.append(self._waited)
        try:
            yield
        finally:
            listeners.remove(self._waited)
            self.recording = self.reads.recording = False
            self.memory.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:
            device = (args[0] if type(args[0]) is FakeTensor else parts(args[0])[0]).device
            return self._seen_from_cpp.get(device, device)
        if any(kind is not FakeTensor and is_made_of_tensors(kind) for kind in types):
            return NotImplemented  # its own code runs, and what that does to the tensors inside comes by here
        if get_ident() != self._owner:
            return self._in_thread(func, args, kwargs or {})
        with self._one_at_a_time:
            return self._dispatch(func, args, kwargs or {})

    def _in_thread(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As in the main thread, which fails too where this does."""
        if self.ended:
            raise SystemExit
        with self._one_at_a_time:
            self.elsewhere += 1
            try:
                return self._dispatch(func, args, kwargs)
            except Exception as e:
                self.failure = self.failure or e
                raise

    def settle(self) -> None:
        """Let other threads run until they wait for the main one: so the same ops fall into the step in every run."""
        for _ in range(SETTLING if self.elsewhere else 0):
            before = self.elsewhere
            sleep(0.05)
            if self.elsewhere == before:
                break

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in NAMESPACES:
            return self.communicators.run(func, args, kwargs)
        if func is aten.is_pinned.default:
            return is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return pin(self._dispatch(func, args, {**kwargs, "pin_memory": False}))
        kwargs = led_to_cuda(kwargs) if kwargs else kwargs
        given = leaves([args, *kwargs.values()]) if kwargs else leaves(args)
        reaches_gpu = any(map(on_gpu, given))
        if not reaches_gpu and not any(isinstance(x, FakeTensor) for x in given) and not is_large_factory(func, args):
            return func(*args, **kwargs) if func.namespace == "profiler" else self._run_host(func, args, kwargs)
        run = ops_instead(func, args, given if reaches_gpu else None, self.record_kernel)
        if run is not None:
            with self:
                out = run(*args, **kwargs)
            if out is not NotImplemented:
                return out
        run = self._run_gpu if reaches_gpu else self._fake_host
        if torch._C._current_autograd_node() is None:
            if self.failure is not None:
                raise self.failure
            return run(func, args, kwargs)
        try:
            return run(func, args, kwargs)
        except Exception as e:
            # An exception must not leave autograd's engine: the backend's stream guard would end the process.
            self.failure = self.failure or e
            return self._guess(func, args)

    def _run_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.recording:
            return func(*args, **kwargs)
        with mark(self._begin(func, host=True)):
            return func(*args, **kwargs)

    def _fake_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _scalar:
            return self.reads.value(args[0])
        out = self._computed(func, args, kwargs, (args, kwargs))
        self.shadows.follow(func, args, kwargs, out)
        filled = [x for x in leaves(out) if isinstance(x, torch.Tensor) and x.numel() > REAL_ELEMENTS]
        if self.recording and filled and not signature_of(func).view:  # large tensors take the host time
            call = self._begin(func, host=True)
            call.outputs = tuple(self.memory.tensor(x) for x in filled)
            with mark(call):
                pass
        return out

    def signature(self) -> StepWork:
        """What ran on the GPU since the last time."""
        out, self._hash, self._ops, self._elements = StepWork(self._hash, self._ops, self._elements), 0, 0, 0
        return out

    def _run_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        self._hash = hash((self._hash, id(func), *[x.shape for x in tensors]))
        self._ops, self._elements = self._ops + 1, self._elements + sum(x.numel() for x in tensors)
        called = signature_of(func).name
        if (node := torch._C._current_autograd_node()) is not None and not torch.is_grad_enabled():
            func, args = as_on_plain_tensors(func, args, node)
        given = args, kwargs
        if not all(isinstance(x, FakeTensor) for x in tensors):
            args, kwargs = mapped(self._faked, args), {k: mapped(self._faked, v) for k, v in kwargs.items()}
        kwargs = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
        if not self.recording:
            out = self._followed(self._outcome(func, args, kwargs, given, None))
            if self.tape is not None:
                self.tape.add(self, func, args, kwargs, out)
            self.shadows.follow(func, *given, out)
            self._check_memory()
            return out
        call = self._begin(func, host=False)
        call.called = called
        call.inputs = self._arguments(func, args, kwargs)
        self.shadows.ask(func, *given, self.memory)
        with mark(call), unprofiled():
            out = self._outcome(func, args, kwargs, given, call)
        self._price(call, func, *given)
        self._finish(call, func, args, kwargs, out)
        self.shadows.follow(func, *given, out)
        self._check_memory()
        return out

    def _check_memory(self) -> None:
        """Run out of memory where the code is ready for it; elsewhere the answer says that the step does not fit."""
        if self.memory.live > self.capacity:
            self._too_large = True
        if self._too_large and torch._C._current_graph_task_id() == -1:  # an exception must not cross autograd's engine
            self._too_large = False
            if expects_out_of_memory():
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. GPU 0 has a total capacity of {self.capacity / 2**30:.2f} GiB, of which "
                    f"{self.memory.live / 2**30:.2f} GiB would be allocated by PyTorch."
                )

    def _followed(self, out: Any) -> Any:
        """Know of memory taken before the recorded step, so that it is not taken for new in it."""
        for x in leaves(out):
            if isinstance(x, FakeTensor) and on_gpu(x):
                self.memory.storage_of(x)
        return out

    def _outcome(self, func: Any, args: Any, kwargs: Any, given: Any, call: RecordedCall | None) -> Any:
        if func is _scalar:
            if call:
                call.sync = True
            return self.reads.value(args[0])
        if func is aten.add_.Tensor and isinstance(args[1], torch.Tensor) and args[1].is_sparse:
            return args[0]  # its shape is all there is to know, and fake tensors cannot add these
        if not signature_of(func).returns:
            return None  # a fused optimizer's step, or the like: it changes its inputs, whose shapes stay
        if has_outcome(func):
            if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
                self.note(f"the sizes of the groups at {self.places.line()} are not known: taken to be equal")
            with self.fake:
                return OUTCOMES[func](*args, **kwargs)
        try:
            out = self._computed(func, args, kwargs, given, call)
        except UnsupportedOperatorException:
            known = registered(signature_of(func).name)
            if known is None or known.outputs is None:
                raise no_outputs(signature_of(func).name, self.places.line()) from None
            with self.fake:
                out = known.outputs(*args, **kwargs)
        if func in _copies:
            out = self.reads.copied_over(func, args, kwargs, given, out, call)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any, given: Any, call: RecordedCall | None = None) -> Any:
        """What the op returns, as a fake run has it and CUDA lays it out."""

        def compute() -> Any:
            with explained(func), self.fake:
                out = func(*args, **kwargs)
                return as_on_cuda(func, args, out) if any(on_gpu(x) for x in leaves(out)) else out

        try:
            return self.memo.run(func, args, kwargs, compute)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if call:
                call.sync = True  # the host waits to learn the size
            return self.reads.sized(func, *given)

    def _guess(self, func: Any, args: Any) -> Any:
        first = next((x for x in leaves(args) if on_gpu(x)), None)
        with self.fake:
            out = tuple(None if first is None else torch.empty_like(first) for _ in func._schema.returns)
        return out[0] if len(out) == 1 else (out or None)

    def _faked(self, x: Any) -> Any:
        """A host tensor as an argument of a GPU op: only its shape matters."""
        if not is_real(x) or x.is_sparse:
            return x
        with self.fake:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        return pin(fake) if is_pinned(x) else fake

    def _begin(self, func: Any, host: bool) -> RecordedCall:
        called = signature_of(func)
        call = RecordedCall(index=len(self.calls), name=called.name, overload=called.overload, host=host)
        self.places.fill(call)
        call.speed = self.speed
        self.calls.append(call)
        self.assumptions.ran(call.index)
        return call

    def _price(self, call: RecordedCall, func: Any, args: Any, kwargs: Any) -> None:
        """What a custom op costs, where somebody says so."""
        if func.namespace in KNOWN:
            return
        if (own := same_as(call.name, args)) is not None:
            call.name, call.overload = own[0], ""
            call.inputs = tuple(self._argument(x) for x in own[1])
        elif (known := registered(call.name)) is not None:
            call.cost = known.cost_of(args, kwargs)
        elif not signature_of(func).view and not is_priced_by_bytes(call.name):
            self.unpriced[call.name] = None

    def record_kernel(self, name: str, given: Any, made: Any, written: Any, cost: OpCost) -> None:
        """A kernel that does not come through PyTorch's dispatcher."""
        self.shadows.lose([*made, *written])
        self._record(name, tuple(given), made, written, cost=cost)

    def record_collective(self, name: str, given: Any, written: Any, group: str, *, sync: bool = False) -> None:
        """A collective or a message of a process group, on a stream of the group's own; with no group, a copy."""
        sent = () if {*map(id, given)} <= {*map(id, written)} else given  # a part of what is sent may be written over
        self._record(name, tuple(x for x in (written, sent) if x), (), written, group=group, sync=sync)

    def _record(self, name: str, given: Any, made: Any, written: Any, group: str = "", **fields: Any) -> None:
        self._hash = hash((self._hash, name, group, *(getattr(x, "shape", x) for x in leaves(given))))
        self._ops += 1
        if not self.recording:
            return
        call = RecordedCall(index=len(self.calls), name=name, overload="", host=False, **fields)
        self.places.fill(call)
        self.calls.append(call)
        self.assumptions.ran(call.index)
        call.group, call.stream, call.issued = group, group or call.stream, call.stream if group else None
        call.inputs = tuple(self._argument(x) for x in given)
        call.outputs, call.writes = (tuple(self.memory.tensor(x) for x in some) for some in (made, written))
        with mark(call):
            pass

    def described(self, func: Any) -> RecordedCall:
        """A call that is not recorded now, with where it comes from."""
        called = signature_of(func)
        call = RecordedCall(index=-1, name=called.name, overload=called.overload, host=False, called=called.name)
        self.places.fill(call)
        return call

    def recorded_again(self, call: RecordedCall, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A call that a CUDA graph replays."""
        self._hash, self._ops = hash((self._hash, func)), self._ops + 1
        if self.recording:
            call.inputs = self._arguments(func, args, kwargs)
            self.calls.append(call)
            with mark(call):
                self._finish(call, func, args, kwargs, out)

    def _finish(self, call: RecordedCall, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        signature = signature_of(func)
        call.view = signature.view
        copied = func in _copies
        outputs = [x for x in leaves(out) if isinstance(x, torch.Tensor) and (on_gpu(x) or copied)]
        call.outputs = tuple(self.memory.tensor(x) for x in outputs)
        for place, name in signature.writes:
            value = args[place] if place < len(args) else kwargs.get(name)
            written = [x for x in leaves(value) if isinstance(x, torch.Tensor) and on_gpu(x)]
            call.writes += tuple(self.memory.tensor(x) for x in written)
        if call.name != signature.name:  # PyTorch's own op for it returns what this one writes
            call.outputs, call.writes = call.writes + call.outputs, ()

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Arg, ...]:
        named = signature_of(func).arguments[len(args) :]
        values = [*args, *(kwargs.get(name, default) for name, default in named)]
        return tuple(self._argument(value) for value in values)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # a number in a host tensor is a number; anything larger has a shape that an op shows
            return Ref(self.memory.tensor(value)) if on_gpu(value) or value.dim() else None
        if isinstance(value, list | tuple):
            return [self._argument(v) for v in value]
        if isinstance(value, bool | int | float | str) or value is None:
            return value
        return str(value).removeprefix("torch.")

    def note(self, text: str) -> None:
        if self.recording:
            self.notes[text] = None

    def _waited(self, name: str, tensors: Any = (), group: str = "") -> None:
        """The host waits for the GPU; with a group, the current stream for its collective on these tensors."""
        call = RecordedCall(index=len(self.calls), name=name, overload="", host=True, sync=not group, group=group)
        self.places.fill(call)
        self.calls.append(call)
        call.inputs = tuple(map(self._argument, tensors))
        with mark(call):
            pass
