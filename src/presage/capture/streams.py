"""CUDA streams, events and graphs during a capture.

Ops say which stream they were issued on; what waits for what follows from the memory they share. What is captured into
a CUDA graph runs once, unrecorded, and is written down; every replay records those ops again, as one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture.calls import RecordedCall
from presage.capture.compiled import as_graphs
from presage.capture.contents import current_recorder, leaves, mapped, unprofiled
from presage.errors import PresageError

CUDA = torch.device("cuda", 0)
_names: dict[int, str] = {}  # of streams, in the order in which a capture used them


class FakeStream:
    """A stream; the usual one has no name."""

    device_index, stream_type, priority = 0, 1, 0
    device = CUDA

    def __init__(self, *args: Any, usual: bool = False, **kwargs: Any) -> None:
        del args, kwargs
        self.usual = usual
        self.cuda_stream = self.stream_id = 0 if usual else id(self)

    @property
    def name(self) -> str:
        return "" if self.usual else _names.setdefault(id(self), f"stream {len(_names) + 1}")

    def __enter__(self) -> FakeStream:
        _stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _stack.pop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # noqa: ARG005

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def record_event(self, event: Any = None) -> Any:
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """An event; the GPU waits for it by itself where memory is shared, the host where it says so."""

    device = CUDA
    recorded = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None:
        del stream
        self.recorded = True

    def synchronize(self) -> None:
        if self.recorded:
            torch.cuda.synchronize()

    def wait(self, stream: Any = None) -> None:
        del stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds; nothing runs, so any will do that can be divided by."""
        del other
        return 1.0


_usual = FakeStream(usual=True)
_stack: list[FakeStream] = []


def current_stream(device: Any = None) -> FakeStream:
    del device
    return _stack[-1] if _stack else _usual


def _set_stream(stream: Any) -> None:
    _stack[:] = [stream] if isinstance(stream, FakeStream) and not stream.usual else []


def restart() -> None:
    """A capture begins."""
    _stack.clear()
    _names.clear()


# ---- CUDA graphs


@dataclass(frozen=True)
class _Slot:
    """A tensor as an op of a graph saw it."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class _TapedOp:
    call: RecordedCall
    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any


class FakeCudaGraph:
    """The ops of a captured graph. Memory that was given back while it was captured is taken anew in every replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.ops: list[_TapedOp] = []
        self.name = ""
        self._held: dict[int, Any] = {}  # storages that outlive the capture
        self._sizes: dict[int, int] = {}
        self._last: dict[int, int] = {}  # the op that uses a storage last
        self._was_recording = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None  # noqa: ARG005

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        recorder = _recorder()
        self.ops, self.name = [], f"CUDA graph {next(recorder.graph_numbers)}"
        self._was_recording, recorder.recording, recorder.tape = recorder.recording, False, self

    def capture_end(self) -> None:
        recorder = _recorder()
        recorder.recording, recorder.tape = self._was_recording, None
        alive = {number: ref() for number, ref in recorder.memory.alive()}
        self._held = {s: alive[s] for s in self._sizes if alive.get(s) is not None}

    def add(self, recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op that ran while the graph is captured."""
        call = recorder.described(func)

        def slot(x: Any) -> Any:
            if not isinstance(x, FakeTensor) or x.fake_device.type != "cuda":
                return x
            storage = recorder.memory.storage_of(x)
            self._sizes[storage] = x.untyped_storage().nbytes()
            self._last[storage] = len(self.ops)
            return _Slot(storage, tuple(x.shape), tuple(x.stride()), x.dtype, int(x.storage_offset()))

        named = {k: mapped(slot, v) for k, v in kwargs.items()}
        self.ops.append(_TapedOp(call, func, mapped(slot, args), named, mapped(slot, out)))

    def replay(self) -> None:
        recorder = _recorder()
        if not self.name:
            raise PresageError("CUDAGraph.replay() before anything was captured into it (torch.cuda.graph)")
        before = {call.replayed for call in recorder.calls}
        again = sum(name == self.name or name.startswith(f"{self.name},") for name in before)
        name = f"{self.name}, replay {again + 1}" if again else self.name
        now: dict[int, torch.Tensor] = {}  # memory of this replay, in bytes

        def tensor(x: Any) -> Any:
            if not isinstance(x, _Slot):
                return x
            if x.storage not in now:
                now[x.storage] = self._memory(x.storage)
            return now[x.storage].view(x.dtype).as_strided(x.shape, x.strides, x.offset)

        for i, op in enumerate(self.ops):
            with unprofiled(), recorder.fake:
                args, out = mapped(tensor, op.args), mapped(tensor, op.out)
                kwargs = {k: mapped(tensor, v) for k, v in op.kwargs.items()}
            call = replace(op.call, index=len(recorder.calls), replayed=name)
            recorder.recorded_again(call, op.func, args, kwargs, out)
            used = {s.storage for s in leaves([op.args, op.out, *op.kwargs.values()]) if isinstance(s, _Slot)}
            del args, kwargs, out
            for storage in used:
                if self._last[storage] == i:
                    now.pop(storage, None)
        recorder.places.stepped += any(op.call.phase == "optimizer" for op in self.ops)

    def _memory(self, storage: int) -> torch.Tensor:
        if storage in self._held:
            memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=CUDA)
            memory.set_(self._held[storage])
            return memory
        return torch.empty(self._sizes[storage], dtype=torch.uint8, device=CUDA)


@contextmanager
def _captured(graph: FakeCudaGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    del args, kwargs
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _recorder() -> Any:
    found = current_recorder()
    if found is None:
        raise PresageError(
            "a CUDA graph can only be captured with its step: make it in the function that builds the step"
        )
    return found


def stream_patches() -> list[tuple[Any, str, Any]]:
    graphs = torch.cuda.graphs
    out: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "Event", FakeEvent),
        (torch.cuda, "ExternalStream", FakeStream),
        (torch.cuda, "stream", lambda s: s if isinstance(s, FakeStream) else nullcontext(s)),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "default_stream", lambda device=None: _usual),  # noqa: ARG005
        (torch.cuda, "set_stream", _set_stream),
    ]
    for owner in (torch.cuda, graphs):
        out += [
            (owner, "CUDAGraph", FakeCudaGraph),
            (owner, "graph", _captured),
            (owner, "make_graphed_callables", as_graphs),
            (owner, "graph_pool_handle", lambda: (0, 0)),
        ]
    return out
