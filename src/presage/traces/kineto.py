"""Kineto (PyTorch profiler) traces, 2021 to 2026, plain or gzip, as a `Trace`."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.traces import calltree, kineto_schema, links
from presage.traces.gloo import lifted
from presage.traces.jsonfile import event_chunks
from presage.traces.kineto_schema import (
    GPU_CATEGORIES,
    HOST_CATEGORIES,
    IGNORED_CATEGORIES,
    NO_ARGS,
    Args,
    File,
    KinetoEvent,
)
from presage.traces.trace import Collective, GpuEvents, HostEvents, HostKind, Sync, Trace, TraceStream, TraceThread

MOST_EVENTS = 30_000_000  # about 5 GiB of memory
LATEST_US = 2**52  # beyond it, microseconds as floats lose their units' place; the year 2112 comes before


def read(path: str | Path, ignore: Iterable[str] = (), arguments: bool = False) -> Trace:
    """Read one rank's trace. `ignore` names further categories of events to leave out; '*' stands for all unknown.
    `arguments`: also the strides and values of the arguments of ops."""
    path = Path(path)
    columns = _Columns(path, {c.lower() for c in ignore}, arguments)
    count = 0
    with _no_collector():
        pieces = event_chunks(path, lambda t: kineto_schema.events(path, t), lambda t: kineto_schema.file(path, t))
        for events, about in pieces:
            if about is not None:
                columns.about(about)
            columns.take(events)
            count += len(events)
            if count > MOST_EVENTS:
                raise InputError(path, f"has more than {MOST_EVENTS:,} events: profile fewer steps", "traceEvents")
    return lifted(columns.trace())


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of records that cannot form cycles: the collector would only walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Interned(dict[Any, int]):
    """Numbers its keys in the order they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return len(self) - 1


class _Table:
    """Growing columns of one kind of event, a list of arrays per column."""

    def __init__(self, **dtypes: Any) -> None:
        self.parts: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, dtype)] for name, dtype in dtypes.items()}

    def add(self, **columns: Any) -> None:
        for name, values in columns.items():
            self.parts[name].append(np.asarray(values, self.parts[name][0].dtype))

    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


def _host_table() -> _Table:
    small = dict.fromkeys(("name", "thread", "dims", "types", "details"), np.int32)
    return _Table(kind=np.int8, **small, **dict.fromkeys(("start", "end", "correlation", "sequence"), np.int64))


def _gpu_table() -> _Table:
    wide = dict.fromkeys(("start", "end", "correlation", "bytes"), np.int64)
    return _Table(kind=np.int8, name=np.int32, stream=np.int32, **wide)


class _Columns:
    """Gathers the columns of a Trace from chunks of events."""

    def __init__(self, path: Path, ignore: set[str], arguments: bool) -> None:
        self.path, self.ignore, self.arguments = path, IGNORED_CATEGORIES | ignore, arguments
        self.names, self.shapes, self.details = _Interned(), _Interned(), _Interned()
        self.threads: _Interned = _Interned()
        self.streams: _Interned = _Interned()
        self.host, self.gpu = _host_table(), _gpu_table()
        self.base_us: int | None = None
        self.collectives: list[tuple[int, Collective]] = []
        self.syncs: list[Sync] = []
        self.flows: list[links.FlowArrow] = []
        self.thread_names: dict[tuple[str, str], str] = {}
        self.ignored: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.gpus: tuple[str, ...] = ()
        self.rank: int | None = None
        self.world: int | None = None
        self.base_ns = 0
        self.stacks = False
        self.machine = ""
        self.gpu_count = 0

    def about(self, file: File) -> None:
        devices = file.devices if isinstance(file.devices, list) else []
        self.gpus = self.gpus or tuple(str(d.get("name", "")) for d in devices if isinstance(d, dict))
        if file.distributed is not None:
            self.rank = _integer(file.distributed.rank)
            self.world = _integer(file.distributed.world)
            if self.rank is not None and self.rank < 0:
                raise InputError(self.path, f"is {self.rank}: ranks are 0 and up", "distributedInfo.rank")
        self.base_ns = file.base or self.base_ns
        self.stacks = self.stacks or bool(file.stacks)
        self.machine = self.machine or str(file.machine or "")

    def take(self, events: list[KinetoEvent]) -> None:
        host: list[KinetoEvent] = []
        host_kind: list[int] = []
        gpu: list[KinetoEvent] = []
        gpu_kind: list[int] = []
        for e in events:
            if e.ph == "X":
                category = e.cat.lower()
                if (kind := HOST_CATEGORIES.get(category)) is not None:
                    host.append(e)
                    host_kind.append(kind)
                elif (work := GPU_CATEGORIES.get(category)) is not None:
                    gpu.append(e)
                    gpu_kind.append(work)
                else:
                    self._other(e, category)
            elif e.cat == "fwdbwd" and e.ts is not None:
                self.flows.append(links.FlowArrow(e.ph == "s", str(e.id), self.threads[_key(e)], float(e.ts)))
            elif e.ph == "M" and e.name == "thread_name" and e.args:
                self.thread_names[_key(e)] = str(e.args.name)
        if host:
            self._take_host(host, host_kind)
        if gpu:
            self._take_gpu(gpu, gpu_kind)

    def _other(self, e: KinetoEvent, category: str) -> None:
        if category == "cuda_sync" and e.args:
            a = e.args
            kind, on = str(a.sync_kind or e.name), _integer(a.stream)
            self.syncs.append(
                Sync(kind, _integer(a.correlation, -1), on, _integer(a.wait_on_stream), _integer(a.record))
            )
        elif category in self.ignore or "*" in self.ignore:
            self.ignored[e.cat or "(none)"] += 1
        else:
            self.unknown[e.cat] += 1

    def _take_host(self, events: list[KinetoEvent], kind: list[int]) -> None:
        args = [e.args or NO_ARGS for e in events]
        start, end = self._times(events)
        self.host.add(
            kind=kind,
            name=[self.names[e.name] for e in events],
            thread=[self.threads[_key(e)] for e in events],
            start=start,
            end=end,
            correlation=_integers([a.correlation for a in args]),
            sequence=_integers([a.sequence for a in args]),
            dims=self._raw([a.dims for a in args]),
            types=self._raw([a.types for a in args]),
            details=[self.details[bytes(a.strides), bytes(a.values)] if self.arguments else -1 for a in args],
        )

    def _take_gpu(self, events: list[KinetoEvent], kind: list[int]) -> None:
        args = [e.args or NO_ARGS for e in events]
        start, end = self._times(events)
        self.gpu.add(
            kind=kind,
            name=[self.names[e.name] for e in events],
            stream=[self.streams[_stream(e, a)] for e, a in zip(events, args, strict=True)],
            start=start,
            end=end,
            correlation=_integers([a.correlation for a in args]),
            bytes=_integers([a.bytes for a in args]),
        )
        for i, a in enumerate(args, self.gpu_count):
            if a.collective is not None:
                self.collectives.append((i, _collective(a)))
        self.gpu_count += len(events)

    def _raw(self, values: list[msgspec.Raw]) -> list[int]:
        return [self.shapes[text] if (text := bytes(v)) else -1 for v in values]

    def _times(self, events: list[KinetoEvent]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end in whole nanoseconds after a base near the first event, so that no digits are lost."""
        for field in ("ts", "dur"):
            bad = next((e for e in events if not isinstance(getattr(e, field), int | float)), None)
            if bad is not None:
                raise InputError(self.path, f"event {bad.name!r} ({bad.cat}) has none", f"traceEvents[].{field}")
        ts = np.array([e.ts for e in events], np.float64)
        dur = np.array([e.dur for e in events], np.float64)
        if dur.min() < 0:
            e = events[int(dur.argmin())]
            raise InputError(
                self.path, f"event {e.name!r} ({e.cat}) has the negative duration {e.dur}", "traceEvents[].dur"
            )
        if not ((np.abs(ts) < LATEST_US).all() and (dur < LATEST_US).all()):
            raise InputError(self.path, "a time is not finite or absurdly large", "traceEvents[].ts")
        if self.base_us is None:
            self.base_us = int(ts[0])
        first = np.rint((ts - self.base_us) * 1000).astype(np.int64)
        return first, first + np.rint(dur * 1000).astype(np.int64)

    def trace(self) -> Trace:
        if self.unknown:
            found = ", ".join(f"{c!r} ({n} events)" for c, n in self.unknown.most_common(5))
            raise InputError(
                self.path,
                f"unknown categories {found}; skip them with --ignore CATEGORY (or '*')",
                "traceEvents[].cat",
            )
        host, columns = _host(self.host.columns()), self.gpu.columns()
        order = np.lexsort((columns["end"], columns["start"], columns["stream"]))
        columns = {name: values[order] for name, values in columns.items()}
        gpu = GpuEvents(**columns, launch=links.launches(host, columns["correlation"]))
        if not len(host) and not len(gpu):
            raise InputError(
                self.path, "no operator, call or kernel in it: not a PyTorch profiler trace", "traceEvents"
            )
        place = np.argsort(order)
        names = tuple(self.names)
        return Trace(
            path=str(self.path),
            rank=self.rank,
            world=self.world,
            gpus=self.gpus,
            origin_ns=self.base_ns + (self.base_us or 0) * 1000,
            names=names,
            shapes=tuple(self.shapes),
            details=tuple(self.details),
            threads=tuple(TraceThread(p, t, self.thread_names.get((p, t), "")) for p, t in self.threads),
            streams=tuple(TraceStream(*s) for s in self.streams),
            host=host,
            gpu=gpu,
            steps=links.steps(host, names),
            collectives={int(place[i]): c for i, c in self.collectives},
            syncs=tuple(self.syncs),
            forward_of=links.forward_of(host, self.flows, self.base_us or 0),
            ignored=dict(self.ignored),
            has_stacks=self.stacks or "python_function" in self.ignored,
            machine=self.machine,
        )


def _host(columns: dict[str, NDArray[Any]]) -> HostEvents:
    kind, thread, start, end = (columns[name] for name in ("kind", "thread", "start", "end"))
    # of two events over the same span the region is outside, the call inside
    inwards = np.array([1, 0, 2])[kind]
    order = np.lexsort((inwards, -end, start, thread))
    start[order] = calltree.calls_inside(thread[order], start[order], end[order], kind[order] == HostKind.CALL)
    order = np.lexsort((inwards, -end, start, thread))
    events = {name: values[order] for name, values in columns.items()}
    return HostEvents(**events, parent=calltree.parents(events["thread"], events["start"], events["end"]))


def _key(e: KinetoEvent) -> tuple[str, str]:
    return str(e.pid), str(e.tid)


def _stream(e: KinetoEvent, a: Args) -> tuple[int, int]:
    """Device and stream: from the arguments, else from where the event is drawn ('stream 7' on process 0)."""
    device = _integer(a.device)
    stream = _integer(a.stream)
    drawn = "".join(c for c in str(e.tid) if c.isdigit())
    return (
        device if device is not None else _integer(e.pid, 0),
        stream if stream is not None else int(drawn or 0),
    )


def _integer(value: Any, default: Any = None) -> Any:
    if value is None or isinstance(value, int):
        return default if value is None else value
    try:
        return int(value)
    except (ValueError, OverflowError):
        return default


def _integers(values: list[Any]) -> NDArray[np.int64]:
    try:
        return np.array([-1 if v is None else v for v in values], np.int64)
    except (ValueError, OverflowError, TypeError):
        whole = (_integer(v, -1) for v in values)
        return np.array([v if abs(v) < 1 << 62 else -1 for v in whole], np.int64)


def _collective(a: Args) -> Collective:
    return Collective(
        name=str(a.collective),
        in_elements=_integer(a.in_elements, 0),
        out_elements=_integer(a.out_elements, 0),
        dtype=str(a.dtype or ""),
        group="" if a.group is None else str(a.group),
        group_size=_integer(a.group_size, 0),
        ranks=str(a.ranks or ""),
    )
