"""Runs a step's ops without running them, and keeps what each was called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from threading import RLock, get_ident
from time import sleep
from typing import Any, NamedTuple

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
from presage.capture.backend import CUDA, NAME, listeners, stand_in
from presage.capture.call_sites import CallSites, expects_out_of_memory, host_thread
from presage.capture.calls import MemoryTracker, RecordedCall
from presage.capture.composite import OVERRIDES, WHOLE
from presage.capture.contents import is_made_of_tensors, leaves, mapped, parts, unprofiled
from presage.capture.custom_ops import KNOWN, is_priced_by_bytes, no_outputs, registered, same_as
from presage.capture.fake_outputs import OUTCOMES, as_on_cuda, as_on_plain_tensors
from presage.capture.output_memo import OutputMemo
from presage.capture.streams import FakeCudaGraph
from presage.capture.tensor_values import SHAPE_GIVERS, Numbers, TensorValues
from presage.errors import PresageError
from presage.graph.graph import Arg, OpCost, Ref

aten = torch.ops.aten
SETTLING = 100  # times 50 ms that other threads are waited for
REAL_ELEMENTS = 1 << 16  # host tensors up to this size hold real numbers; larger ones (weights, mostly) are fake too
_device_of = torch.ops.prim.device.default
_scalar = aten._local_scalar_dense.default
_copies = (aten._to_copy.default, aten.copy_.default)
_indexing = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
_overrides = {
    getattr(getattr(aten, n.partition(".")[0]), n.partition(".")[2] or "default"): f for n, f in OVERRIDES.items()
}


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
        self.elsewhere = 0  # ops that other threads than the main one ran
        self.capacity = 1 << 62  # bytes of the GPU's memory
        self._too_large = False  # more than that was allocated
        self.ended = False  # the capture is over: threads that were started in it end
        self._one_at_a_time, self._owner = RLock(), get_ident()
        self._hash, self._ops = 0, 0
        self._seen_from_cpp = {CUDA: stand_in()}
        self.tape: FakeCudaGraph | None = None  # the CUDA graph that is being captured
        self.graph_numbers = count(1)
        self.unpriced: dict[str, None] = {}  # custom kernels whose cost nobody says

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The stretch of the run that becomes the graph, in the place of one before."""
        self.recording = True
        self.calls.clear()
        self.notes.clear()
        self.unpriced.clear()
        self.shadows.forget()
        self.assumptions.begin()
        self.memory.start(lambda: len(self.calls))
        listeners.append(self._waited)
        try:
            yield
        finally:
            listeners.remove(self._waited)
            self.recording = False
            self.memory.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:
            device = parts(args[0])[0].device
            return self._seen_from_cpp.get(device, device)
        if any(is_made_of_tensors(kind) for kind in types):
            return NotImplemented  # its own code runs, and what that does to the tensors inside comes by here
        if get_ident() == self._owner:
            with self._one_at_a_time:
                return self._dispatch(func, args, kwargs or {})
        return self._in_thread(func, args, kwargs or {})

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
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if kwargs:
            kwargs = _led_to_cuda(kwargs)
        given = leaves([args, *kwargs.values()])
        on_gpu = any(_on_gpu(x) for x in given)
        if not on_gpu and not any(isinstance(x, FakeTensor) for x in given) and not _large(func, args):
            return self._run_host(func, args, kwargs)
        if func in _overrides:
            with self:
                return _overrides[func](*args, **kwargs)
        if on_gpu and func in _indexing and any(_is_host_index(x) for x in args[1]):
            with self:  # as on CUDA: indices that lie on the host are copied over first
                indices = [x.to(CUDA) if _is_host_index(x) else x for x in args[1]]
                return func(args[0], indices, *args[2:], **kwargs)
        if on_gpu and _is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        run = self._run_gpu if on_gpu else self._fake_host
        if host_thread() == "main":
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
        call = self._begin(func, host=True)
        with _mark(call):
            return func(*args, **kwargs)

    def _fake_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _scalar:
            return self._value(args[0])
        out = self._computed(func, args, kwargs, (args, kwargs))
        self.shadows.follow(func, args, kwargs, out)
        return out

    def signature(self) -> tuple[int, int]:
        """A hash and the number of the GPU ops since the last time."""
        out = self._hash, self._ops
        self._hash, self._ops = 0, 0
        return out

    def _run_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._hash = hash((self._hash, func, *(x.shape for x in leaves(args) if isinstance(x, torch.Tensor))))
        self._ops += 1
        called = _signature(func).name
        if (node := torch._C._current_autograd_node()) is not None and not torch.is_grad_enabled():
            if func is aten.clone.default and args[0].is_sparse and "AccumulateGrad" in node.name():
                return args[0]  # a plain sparse gradient is taken over, not copied
            func, args = as_on_plain_tensors(func, args, node)
        given = args, kwargs
        if any(_is_real(x) for x in leaves([args, *kwargs.values()])):
            args, kwargs = mapped(self._faked, args), {k: mapped(self._faked, v) for k, v in kwargs.items()}
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
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
        with _mark(call), unprofiled():
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
            if isinstance(x, FakeTensor) and _on_gpu(x):
                self.memory.storage_of(x)
        return out

    def _outcome(self, func: Any, args: Any, kwargs: Any, given: Any, call: RecordedCall | None) -> Any:
        if func is _scalar:
            if call:
                call.sync = True
            return self._value(args[0])
        if func is aten.add_.Tensor and isinstance(args[1], torch.Tensor) and args[1].is_sparse:
            return args[0]  # its shape is all there is to know, and fake tensors cannot add these
        if not _signature(func).returns:
            return None  # a fused optimizer's step, or the like: it changes its inputs, whose shapes stay
        if func in OUTCOMES:
            if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
                self.note(f"the sizes of the groups at {self.places.line()} are not known: taken to be equal")
            with self.fake:
                return OUTCOMES[func](*args, **kwargs)
        try:
            out = self._computed(func, args, kwargs, given, call)
        except UnsupportedOperatorException:
            known = registered(_signature(func).name)
            if known is None or known.outputs is None:
                raise no_outputs(_signature(func).name, self.places.line()) from None
            with self.fake:
                out = known.outputs(*args, **kwargs)
        if func in _copies:
            out = self._copied_over(func, args, kwargs, given, out, call)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any, given: Any, call: RecordedCall | None = None) -> Any:
        """What the op returns, as a fake run has it and CUDA lays it out."""

        def compute() -> Any:
            with _explained(func), self.fake:
                out = func(*args, **kwargs)
                return as_on_cuda(func, args, out) if any(_on_gpu(x) for x in leaves(out)) else out

        try:
            return self.memo.run(func, args, kwargs, compute)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if call:
                call.sync = True  # the host waits to learn the size
            return self._sized(func, *given)

    def _sized(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op returns whose output's size, or value, depends on its inputs' numbers: it runs on the host."""
        found: list[Numbers] = []
        needed = SHAPE_GIVERS.get(_signature(func).name)

        def real(place: int, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return torch.device("cpu") if isinstance(x, torch.device) else x
            if needed is not None and place not in needed:
                return torch.zeros((), dtype=x.dtype).expand(x.shape)
            numbers = self.shadows.numbers(x)
            if numbers is None:
                raise PresageError(
                    f"{self.places.line() or 'the step'}: the size of what {func._schema.name} returns is set by the "
                    f"numbers of {x.numel():,} elements, which are not known; give it a fixed size for the capture "
                    "(a mask, or padding)"
                )
            found.append(numbers)
            return numbers.data

        host = [mapped(partial(real, i), a) for i, a in enumerate(args)]
        options = {k: mapped(partial(real, -1), v) for k, v in kwargs.items()}
        with torch.no_grad(), unprofiled():
            out = func(*host, **options)
        if func is aten._pack_padded_sequence.default:
            return self._as_fake(out[0]), out[1]  # the sizes of its batches stay on the host
        if any(n.assumed for n in found):
            shapes = [list(x.shape) for x in leaves(out) if isinstance(x, torch.Tensor)]
            what = f"the size of {func._schema.name}" if shapes else f"what {func._schema.name} says"
            answer = self._assume(what, ", ".join(map(str, shapes)) if shapes else out)
            out = out if shapes else answer
        return self._as_fake(out)

    def _as_fake(self, out: Any) -> Any:
        """Real host tensors as tensors of the same sizes on the fake GPU."""

        def fake(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)

        with self.fake:
            made = mapped(fake, out)
        return tuple(made) if isinstance(out, tuple) else made

    def _assume(self, what: str, value: Any) -> Any:
        """A value that is not known is read here."""
        line, frames = self.places.reader()
        value = self.assumptions.read(line, what, value)
        if self.recording:
            self.assumptions.follow(frames)
        return value

    def _value(self, tensor: torch.Tensor) -> Any:
        numbers = self.shadows.numbers(tensor)
        if numbers is None:
            return torch.ones((), dtype=tensor.dtype).item()
        value = numbers.data.item()
        return (
            self._assume("a truth value" if isinstance(value, bool) else "a number", value)
            if numbers.assumed
            else value
        )

    def _copied_over(self, func: Any, args: Any, kwargs: Any, given: Any, out: Any, call: RecordedCall | None) -> Any:
        source = args[0] if func is aten._to_copy.default else args[1]
        if not isinstance(source, torch.Tensor) or _on_gpu(source) == _on_gpu(out):
            return out
        if call:  # either way the host waits for the copy, unless told not to
            call.sync = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if _on_gpu(out):
            return out
        target = given[0][0] if func is aten.copy_.default else None
        if out.numel() > REAL_ELEMENTS or (target is not None and not _is_real(target)):
            return out
        numbers = self.shadows.numbers(source)
        if numbers is None:
            return out
        if numbers.assumed:
            self._assume("a tensor copied to the host", f"{source.dtype} {list(source.shape)} drawn at random")
        with torch.no_grad(), unprofiled():
            if target is None:
                return numbers.data.to(out.dtype).clone()
            return target.copy_(numbers.data)

    def _guess(self, func: Any, args: Any) -> Any:
        first = next((x for x in leaves(args) if _on_gpu(x)), None)
        with self.fake:
            out = tuple(None if first is None else torch.empty_like(first) for _ in func._schema.returns)
        return out[0] if len(out) == 1 else (out or None)

    def _faked(self, x: Any) -> Any:
        """A host tensor as an argument of a GPU op: only its shape matters."""
        if not _is_real(x) or x.is_sparse:
            return x
        with self.fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    def _begin(self, func: Any, host: bool) -> RecordedCall:
        called = _signature(func)
        call = RecordedCall(index=len(self.calls), name=called.name, overload=called.overload, host=host)
        self.places.fill(call)
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
        elif not _signature(func).view and not is_priced_by_bytes(call.name):
            self.unpriced[call.name] = None

    def record_kernel(self, name: str, given: Any, made: Any, written: Any, cost: OpCost) -> None:
        """A kernel that does not come through PyTorch's dispatcher."""
        self._hash, self._ops = hash((self._hash, name, *(x.shape for x in given))), self._ops + 1
        self.shadows.lose([*made, *written])
        if not self.recording:
            return
        call = RecordedCall(index=len(self.calls), name=name, overload="", host=False, cost=cost)
        self.places.fill(call)
        self.calls.append(call)
        self.assumptions.ran(call.index)
        call.inputs = tuple(self._argument(x) for x in given)
        call.outputs, call.writes = (tuple(self.memory.tensor(x) for x in some) for some in (made, written))
        with _mark(call):
            pass

    def described(self, func: Any) -> RecordedCall:
        """A call that is not recorded now, with where it comes from."""
        called = _signature(func)
        call = RecordedCall(index=-1, name=called.name, overload=called.overload, host=False, called=called.name)
        self.places.fill(call)
        return call

    def recorded_again(self, call: RecordedCall, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A call that a CUDA graph replays."""
        self._hash, self._ops = hash((self._hash, func)), self._ops + 1
        if self.recording:
            call.inputs = self._arguments(func, args, kwargs)
            self.calls.append(call)
            with _mark(call):
                self._finish(call, func, args, kwargs, out)

    def _finish(self, call: RecordedCall, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        signature = _signature(func)
        call.view = signature.view
        copied = func in _copies
        outputs = [x for x in leaves(out) if isinstance(x, torch.Tensor) and (_on_gpu(x) or copied)]
        call.outputs = tuple(self.memory.tensor(x) for x in outputs)
        for place, name in signature.writes:
            value = args[place] if place < len(args) else kwargs.get(name)
            written = [x for x in leaves(value) if isinstance(x, torch.Tensor) and _on_gpu(x)]
            call.writes += tuple(self.memory.tensor(x) for x in written)
        if call.name != signature.name:  # PyTorch's own op for it returns what this one writes
            call.outputs, call.writes = call.writes + call.outputs, ()

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Arg, ...]:
        named = _signature(func).arguments[len(args) :]
        values = [*args, *(kwargs.get(name, default) for name, default in named)]
        return tuple(self._argument(value) for value in values)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # a number in a host tensor is a number; anything larger has a shape that an op shows
            return Ref(self.memory.tensor(value)) if _on_gpu(value) or value.dim() else None
        if isinstance(value, list | tuple):
            return [self._argument(v) for v in value]
        if isinstance(value, bool | int | float | str) or value is None:
            return value
        return str(value).removeprefix("torch.")

    def note(self, text: str) -> None:
        if self.recording:
            self.notes[text] = None

    def _waited(self, name: str) -> None:
        call = RecordedCall(index=len(self.calls), name=name, overload="", host=True, sync=True)
        self.places.fill(call)
        self.calls.append(call)
        with _mark(call):
            pass


def _mark(call: RecordedCall) -> Any:
    """Shows up in PyTorch's own profile, which so tells what the call was nested in."""
    return torch._C._profiler._RecordFunctionFast(f"{'host' if call.host else 'gpu'}#{call.index}")


class _Signature(NamedTuple):
    """What an op's schema says, which takes long to ask."""

    name: str
    overload: str
    arguments: tuple[tuple[str, Any], ...]  # name and default
    writes: tuple[tuple[int, str], ...]
    returns: bool
    view: bool


@cache
def _signature(func: Any) -> _Signature:
    schema = func._schema
    arguments = tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments)
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    writes = tuple((i, arguments[i][0]) for i, w in enumerate(written) if w)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return _Signature(schema.name, schema.overload_name, arguments, writes, bool(schema.returns), view)


def _on_gpu(x: Any) -> bool:
    if isinstance(x, FakeTensor):
        return x.fake_device.type == "cuda"
    return isinstance(x, torch.device) and x.type in ("cuda", NAME)


def _is_host_index(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not _on_gpu(x)


def _is_real(x: Any) -> bool:
    return not isinstance(x, FakeTensor) and isinstance(x, torch.Tensor)


def _led_to_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    device = kwargs.get("device")
    if device is not None and device.type == NAME:
        return {**kwargs, "device": CUDA}
    return kwargs


def _large(func: Any, args: Any) -> bool:
    """A factory of a large host tensor: weights on their way to the GPU."""
    if not args or not isinstance(args[0], list | tuple) or not all(type(n) is int for n in args[0]):
        return False
    size = 1
    for n in args[0]:
        size *= n
    return size > REAL_ELEMENTS and func._schema.returns and not any(isinstance(a, torch.Tensor) for a in args)


@cache
def _is_composite(func: Any) -> bool:
    """It reaches the recorder only where autograd is off (inference mode), and is still to be taken apart."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(composite) and func._schema.name.removeprefix("aten::") not in WHOLE


@contextmanager
def _explained(func: Any) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        raise
    except Exception as e:
        # Some of PyTorch's own exceptions cannot be carried from autograd's thread to the caller's.
        raise RuntimeError(f"{func._schema.name}: {e}") from e
