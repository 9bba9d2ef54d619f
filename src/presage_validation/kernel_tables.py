"""Tables of measured kernel times, as published: every shape once, as the call that a kernel model knows.

A table has a row per measurement: bf16 products (columns `m, n, k`), causal prefill attention (`batch, seq_len,
num_heads, num_kv_heads, head_dim, window_size`), or float32 kernels (`op, device` and the sizes). The GPU stands in a
`device` column or begins the file's name. A shape that several collectors timed counts once, with their median; how
far they are from it is the noise that no model can go below. A collector with times that would take more than the
GPU's peak is left out whole.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from presage.costs.call import Call, Shape, Value
from presage.errors import InputError, PresageError
from presage.files import reading
from presage.hardware import Gpu, gpu, gpus
from presage_validation.label_ops import dense, turned
from presage_validation.score import Skipped

MS = 1e-3
TIME = "latency_ms"
GEMM = ("dtype", "m", "n", "k")
ATTENTION = ("dtype", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
SIZES = ("B", "M", "N", "K", "H", "C_in", "C_out", "ksize", "HW", "stride", "padding")
NAMED = {"a100_sxm": "a100_80gb", "h200_sxm": "h200", "b200_sxm": "b200"}  # how file names call GPUs
COLLECTOR = ("framework", "version", "kernel")
IMPOSSIBLE = 1.1  # times the peak of the GPU
# Host seconds in NeuSight's tables: times of one op on rows of one width, over their number, do not begin at zero. The
# middle of the GPUs in its train tables (tools/fit_issue.py); its test tables show about as much.
ISSUE = {"elementwise": 1.66e-5, "softmax": 2.63e-5, "layernorm": 5.01e-5}
SLOW_PATH = 1.3  # a product so much slower than one with more rows was not the kernel's doing

Key = tuple[str, ...]
Times = dict[Key, list[tuple[str, float]]]  # by shape: collector, seconds


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """One shape on one GPU."""

    gpu: Gpu
    kernel: str
    name: str
    call: Call
    seconds: float  # the median over the collectors
    spread: float | None  # the mean distance of collectors from it, as a fraction, where there are several
    sizes: tuple[int, ...] = ()  # of engines' ops, in the order of the table's columns
    by: tuple[tuple[str, float], ...] = ()  # of engines' ops: each collector and its seconds
    issue: float = 0.0  # seconds that the host takes between the events around a call, which are in its time

    @property
    def family(self) -> str:
        """The kind of kernel, under a window or not."""
        return self.kernel.partition(",")[0]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A shape of a table, before its times."""

    gpu: Gpu
    name: str
    work: KernelWork


@dataclass(frozen=True)
class KernelTable:
    path: Path
    shapes: tuple[MeasuredKernel, ...]
    skipped: tuple[Skipped, ...]


def read_table(path: str | Path) -> KernelTable:
    """A table, a .csv or .csv.gz file. What cannot be used is counted and named by its reason."""
    file = Path(path)
    lines = iter(_lines(file))
    header = next(lines, [])
    fields = _fields(file, header)
    times, bad = _times(header, fields, lines)
    device = "" if "device" in fields else _named_in(file)
    rows, reasons = _kernels(times, fields, device)
    broken = _broken(times, rows)
    shapes = [s for s in (_measured(rows[key], times[key], broken) for key in rows) if s is not None]
    kept, slow = _without_slow(shapes)
    for found in (f for key in rows for f in times[key] if f[0] in broken):
        reasons[f"collector {found[0]} has times beyond the GPU's peak"] += 1
    reasons["products over 30% slower than with more rows (medians of collectors)"] += slow
    skipped = [Skipped(f"{n} rows of {file.name}", reason) for reason, n in reasons.items() if n]
    return KernelTable(file, tuple(kept), (*bad, *skipped))


def _kernels(times: Times, fields: Sequence[str], device: str) -> tuple[dict[Key, Kernel], Counter[str]]:
    """What each shape is, and how many rows are of none that is known."""
    found: dict[Key, Kernel] = {}
    reasons: Counter[str] = Counter()
    for key, some in times.items():
        row = dict(zip(fields, key, strict=True))
        try:
            chip = _gpu(device or row["device"])
            name = " ".join(f"{k}={v}" for k, v in row.items() if v and k not in ("device", "dtype"))
            found[key] = Kernel(chip, name, _work(row))
        except (Unknown, PresageError) as e:
            reason = str(e) if isinstance(e, Unknown) else f"no facts of this GPU: {row.get('device', '')}"
            reasons[reason] += len(some)
    return found, reasons


def _lines(file: Path) -> list[list[str]]:
    try:
        return list(csv.reader(reading.lines(file)))
    except csv.Error as e:
        raise InputError(file, f"not a table of kernel times ({e})") from e


def _fields(file: Path, header: Sequence[str]) -> tuple[str, ...]:
    """The columns that tell one shape from another."""
    there = set(header)
    if TIME not in there:
        raise InputError(file, f"no such column among those of the table: {', '.join(header)}", TIME)
    device = ("device",) if "device" in there else ()
    for needed in (GEMM, ATTENTION):
        if set(needed) <= there:
            return (*device, *needed)
    if {"op", "device"} <= there:
        return (*device, "op", *(c for c in SIZES if c in there))
    raise InputError(file, f"unknown kind of kernel table: its columns are {', '.join(header)}")


def _times(header: Sequence[str], fields: Sequence[str], lines: Iterable[list[str]]) -> tuple[Times, list[Skipped]]:
    """Seconds by shape, and the lines that have none."""
    places, time = [header.index(f) for f in fields], header.index(TIME)
    who = [] if "op" in fields else [header.index(c) for c in COLLECTOR if c in header]
    times: Times = {}
    bad = []
    for number, line in enumerate(lines, 2):
        try:
            seconds = MS * float(line[time])
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{TIME} {line[time]}")
            times.setdefault(tuple([line[p] for p in places]), []).append((" ".join([line[p] for p in who]), seconds))
        except (ValueError, IndexError) as e:
            bad.append(Skipped(f"line {number}", f"not a measurement ({e})"))
    return times, bad


def _named_in(file: Path) -> str:
    """The GPU that begins the file's name."""
    known = NAMED | {g.key: g.key for g in gpus()}
    found = [name for name in known if file.name.lower().startswith(name)]
    if not found:
        there = ", ".join(sorted(known))
        raise InputError(
            file, f"of which GPU? Begin the file's name with it, or add the column; known: {there}", "device"
        )
    return known[max(found, key=len)]


@lru_cache(64)
def _gpu(name: str) -> Gpu:
    return gpu(name)


def _broken(times: Times, kernels: Mapping[Key, Kernel]) -> set[str]:
    """The collectors with times that the GPU cannot reach."""
    out = set()
    for key, kernel in kernels.items():
        least = kernel.work.flops / (IMPOSSIBLE * kernel.gpu.peak.get("bf16", float("inf")))
        out |= {who for who, seconds in times[key] if seconds < least}
    return out


def _measured(kernel: Kernel, times: Sequence[tuple[str, float]], broken: set[str]) -> MeasuredKernel | None:
    by = tuple((who, t) for who, t in times if who not in broken)
    if not by:
        return None
    seconds, work = [t for _, t in by], kernel.work
    middle = float(np.median(seconds))
    apart = float(np.abs(np.array(seconds) / middle - 1).mean()) if len(seconds) > 1 else None
    issue = 0.0 if work.sizes else ISSUE.get(work.kernel, 0.0)
    return MeasuredKernel(kernel.gpu, work.kernel, kernel.name, work.call, middle, apart, work.sizes, by, issue)


def _work(row: Mapping[str, str]) -> KernelWork:
    if "op" in row:
        if row["op"] not in BUILDERS:
            raise Unknown(f"no model of op {row['op']!r}")
        kernel, build = BUILDERS[row["op"]]
        return KernelWork(kernel, build({k: _size(k, row[k]) for k in SIZES if row.get(k)}), 0.0)
    sizes = {k: _size(k, v) for k, v in row.items() if k not in ("dtype", "device")}
    return gemm(sizes, row["dtype"]) if "m" in row else attention(sizes, row["dtype"])


def _size(name: str, text: str) -> int:
    """A size as a whole number, be it written 64 or 64.0."""
    try:
        value = float(text)
    except ValueError as e:
        raise Unknown(f"{name} is not a number") from e
    if not 0 <= value < 1e15 or value != int(value) or (value == 0 and name not in ("padding", "window_size")):
        raise Unknown(f"{name} is {text}")
    return int(value)


def _without_slow(shapes: Sequence[MeasuredKernel]) -> tuple[list[MeasuredKernel], int]:
    """Products without those that took much longer than the same with more rows: slow paths, or a clock that fell."""
    curves: dict[tuple[str, int, int], list[tuple[int, MeasuredKernel]]] = {}
    for s in shapes:
        if s.kernel == "gemm":
            a, b = s.call.tensors[:2]
            curves.setdefault((s.gpu.key, b.sizes[1], a.sizes[1]), []).append((a.sizes[0], s))
    slow = set()
    for curve in curves.values():
        points = sorted(curve, key=lambda p: p[0])
        slow |= {id(s) for (_, s), (_, larger) in pairwise(points) if s.seconds > SLOW_PATH * larger.seconds}
    return [s for s in shapes if id(s) not in slow], len(slow)


# What the rows of published kernel tables are in PyTorch: the call each one timed.

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
ATTENTION_SIZES = ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
WIDEST_HEAD = 256  # of fused attention
WINDOW_TILE = 128  # a window meets this much more than itself: its two ends lie within tiles

Sizes = Mapping[str, int]


class KernelWork(NamedTuple):
    """What a row timed: the kind of kernel, the call, and the least FLOPs it takes (zero where not looked at). Rows of
    serving engines have their sizes in the order of the table's columns."""

    kernel: str
    call: Call
    flops: float
    sizes: tuple[int, ...] = ()


class Unknown(ValueError):
    """A row that no model is for."""


def _number(dtype: str) -> str:
    if dtype not in DTYPES:
        raise Unknown(f"no model of numbers of type {dtype!r}")
    return DTYPES[dtype]


def gemm(sizes: Sizes, dtype: str) -> KernelWork:
    """A linear layer without bias: its weights lie in memory as [n, k]."""
    m, n, k, kind = sizes["m"], sizes["n"], sizes["k"], _number(dtype)
    call = Call("aten::mm", (dense(m, k, dtype=kind), Shape((k, n), (1, k), kind)))
    return KernelWork("gemm", call, 2.0 * m * n * k, (m, n, k))


def attention(sizes: Sizes, dtype: str) -> KernelWork:
    """Causal, key and value heads repeated. Under a window each query meets only so many keys: as if there were no
    more, and no mask. Narrow heads get cuDNN's kernel, made for an H200 as the engines' own are for each GPU: flash
    kernels run an H200 with instructions of older GPUs, so what they reach of its peak tells nothing of others."""
    every = b, s, h, _, d, window = tuple(sizes[k] for k in ATTENTION_SIZES)
    kind = _number(dtype)
    if d > WIDEST_HEAD:
        raise Unknown(f"heads wider than {WIDEST_HEAD}: no fused kernel")
    cut = 0 < window < s
    t = min(s, window + WINDOW_TILE) if cut else s
    flops = 4.0 * b * h * d * (s * min(s, window) if cut else s * s) / 2
    name = "attention, window" if cut else "attention"
    if d <= 128:
        q, kv = (Shape((b, h, n, d), (n * h * d, d, h * d, 1), kind) for n in (s, t))
        given: tuple[Value, ...] = (q, kv, kv, None, None, None, s, t, False, 0.0, not cut, False, None)
        return KernelWork(name, Call("aten::_cudnn_attention_forward", given), flops, every)
    q, kv = (dense(b, n, h, d, dtype=kind) for n in (s, t))
    given = (q, kv, kv, None, None, s, t, 0.0, not cut, False, None)
    return KernelWork(name, Call("aten::_flash_attention_forward", given), flops, every)


def _addmm(x: Shape, n: int) -> Call:
    return Call("aten::addmm", (dense(n), x, turned(dense(n, x.sizes[1])), 1, 1))


def _elementwise(op: str) -> Callable[[Sizes], Call]:
    """The call of an op on two tensors (add), on one and a number (addu), or on one (relu)."""
    name = op.removesuffix("u") if op in WITH_NUMBER else op
    other: tuple[Value, ...] = (2.0,) if op in WITH_NUMBER else ()
    scaled = (1,) if name == "add" else ()

    def call(s: Sizes) -> Call:
        x = dense(s["B"], s["H"])
        return Call(f"aten::{name}", (x, *((x,) if op in OF_PAIRS else other), *scaled))

    return call


def _layer_norm(s: Sizes) -> Call:
    row = dense(s["H"])
    return Call("aten::native_layer_norm", (dense(s["B"], s["H"]), (s["H"],), row, row, 1e-5))


def _conv(s: Sizes) -> Call:
    side, k, pad, step = s["HW"], s["ksize"], s["padding"], s["stride"]
    x, w = dense(s["B"], s["C_in"], side, side), dense(s["C_out"], s["C_in"], k, k)
    return Call("aten::cudnn_convolution", (x, w, (pad, pad), (step, step), (1, 1), 1, False, False, False))


OF_PAIRS, WITH_NUMBER = ("add", "div", "mul", "pow"), ("addu", "divu", "mulu", "powu")
# By the op of a row: the kind of kernel, and the call of its sizes. All are float32 without TF32.
BUILDERS: dict[str, tuple[str, Callable[[Sizes], Call]]] = {
    "bmm": ("bmm", lambda s: Call("aten::bmm", (dense(s["B"], s["M"], s["K"]), dense(s["B"], s["K"], s["N"])))),
    "linear": ("linear", lambda s: _addmm(dense(s["B"] * s["M"], s["K"]), s["N"])),
    "conv": ("conv", _conv),
    "ln": ("layernorm", _layer_norm),
    "softmax": ("softmax", lambda s: Call("aten::_softmax", (dense(s["B"], s["H"]), -1, False))),
    **{op: ("elementwise", _elementwise(op)) for op in (*OF_PAIRS, *WITH_NUMBER, "relu", "gelu", "tanh")},
}
