"""What Kineto writes: the categories of events over the years, and the fields presage reads of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from presage.errors import InputError
from presage.traces.trace import GpuKind, HostKind

# 2021 said 'Operator', 'Runtime', 'Kernel'; later profilers 'cpu_op', 'cuda_runtime', 'kernel'.
HOST_CATEGORIES = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "user_annotation": HostKind.ANNOTATION,
    "cuda_runtime": HostKind.CALL,
    "cuda_driver": HostKind.CALL,
    "runtime": HostKind.CALL,
    "privateuse1_runtime": HostKind.CALL,
    "privateuse1_driver": HostKind.CALL,
    "xpu_runtime": HostKind.CALL,
    "mtia_runtime": HostKind.CALL,
}
GPU_CATEGORIES = {
    "kernel": GpuKind.KERNEL,
    "gpu_memcpy": GpuKind.MEMCPY,
    "memcpy": GpuKind.MEMCPY,
    "gpu_memset": GpuKind.MEMSET,
    "memset": GpuKind.MEMSET,
}
# Known, and of no use to the timing of a step.
IGNORED_CATEGORIES = {
    "python_function",
    "gpu_user_annotation",
    "overhead",
    "trace",
    "external_correlation",
    "cuda_profiler_range",
    "collective_comm",
    "glow_runtime",
    "hpu_op",
    "cpu_instant_event",
    "mtia_ccp_events",
    "mtia_insight",
    "mtia_workloadd",
    "mtia_counters",
    "",
}
NOT_NUMBER_WORDS = (b"NaN", b"nan", b"Inf", b"inf")  # looked for first: the pattern is much slower
NOT_NUMBERS = re.compile(rb"(?<=[:\[,])\s*-?(?:NaN|nan|Infinity|inf)\b")

Number: TypeAlias = int | float | str | None


class Args(msgspec.Struct, gc=False, frozen=True):
    correlation: Number = None
    stream: Number = None
    device: Number = None
    sequence: Number = msgspec.field(name="Sequence number", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw(b""))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b""))
    bytes: Number = None
    collective: Number = msgspec.field(name="Collective name", default=None)
    in_elements: Number = msgspec.field(name="In msg nelems", default=None)
    out_elements: Number = msgspec.field(name="Out msg nelems", default=None)
    dtype: Number = None
    group: Number = msgspec.field(name="Process Group Name", default=None)
    group_size: Number = msgspec.field(name="Group size", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    sync_kind: Number = msgspec.field(name="cuda_sync_kind", default=None)
    wait_on_stream: Number = None
    record: Number = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    name: Any = None


NO_ARGS = Args()


class KinetoEvent(msgspec.Struct, gc=False, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: int | float | None = None
    dur: int | float | None = None
    id: Number = None
    args: Args | None = NO_ARGS


class Distributed(msgspec.Struct, gc=False, frozen=True):
    rank: Number = None
    world: Number = msgspec.field(name="world_size", default=None)


class File(msgspec.Struct, gc=False, frozen=True):
    events: list[KinetoEvent] = msgspec.field(name="traceEvents", default_factory=list)
    devices: Any = msgspec.field(name="deviceProperties", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    base: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    stacks: Any = msgspec.field(name="with_stack", default=None)
    machine: Any = msgspec.field(name="host_name", default=None)


EVENTS = msgspec.json.Decoder(list[KinetoEvent])
FILE = msgspec.json.Decoder(File)


def events(path: Path, text: bytes) -> list[KinetoEvent]:
    return _tolerant(path, EVENTS, text)  # type: ignore[no-any-return]


def file(path: Path, text: bytes) -> tuple[list[KinetoEvent], File]:
    found: File = _tolerant(path, FILE, text)
    return found.events, found


def _tolerant(path: Path, decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
    """Decode; a NaN or Infinity, which JSON does not have but profilers wrote, reads as null."""
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not any(word in text for word in NOT_NUMBER_WORDS) or not NOT_NUMBERS.search(text):
                raise
            return decoder.decode(NOT_NUMBERS.sub(b"null", text))
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at ")
        raise InputError(path, what[0].lower() + what[1:], where.strip("`") or "traceEvents") from e
