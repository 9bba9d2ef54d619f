"""Measure a host in seconds, without a GPU: what single calls of Python, the dispatcher and autograd cost.

Every figure is the fastest tenth of short loops that take turns with those of all other calls: other work on the
machine, which comes and goes, counts little. It is processor time of the calling thread; of calls that launch kernels,
which wait for a GPU and for the autograd thread, elapsed time. Calls are those of `host` (a pack's host.json) where a
GPU is not needed; where there is one, those that launch kernels too. The file is one of `presage.hardware.host`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.files.writing import check_writable
from presage.hardware.host import VERSION, cost_name
from presage_fit.calibrate.host import backward_ops, small_ops

Call = Callable[[], Any]
Timer = Callable[[], list[float]]  # microseconds of some loops
Clock = Callable[[], float]
clock: Clock = time.thread_time
ROUNDS, LOOPS, SECONDS = 10, 4, 8e-4  # rounds over all calls, timed loops of a call in each, seconds of a loop
CHAIN = 200  # ops of a backward pass
FASTEST, USUAL = 0.1, 0.75  # quantiles of the loops: the figure, and what a busy machine shows
BUSY = 1.5  # their ratio, above which the host's pace changed: other work on the machine, or others on its processor
TENSORS = 30  # of an optimizer's step


def measure_host(torch: Any, tell: Callable[[str], None]) -> tuple[dict[str, float], bool]:
    """Microseconds by figure, and whether the host's pace changed meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timers = {name: _timer(call) for name, call in _calls(torch)} | dict(_backward(torch))
        if torch.cuda.is_available():
            timers = {**launching_timers(torch, "cuda", torch.cuda.synchronize), **timers}
        rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    near = f"on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "without a GPU"
    tell(f"{len(timers)} calls measured {near}")
    loops = {name: sorted(us for one in rounds for us in one[name]) for name in timers}
    us = {f"{name}_us": _quantile(values, FASTEST) for name, values in loops.items()}
    slower = sorted(_quantile(values, USUAL) / _quantile(values, FASTEST) for values in loops.values())
    return us, _quantile(slower, 0.5) > BUSY


def _calls(torch: Any) -> Iterator[tuple[str, Call]]:
    """Calls by name: first those that cost the same beside a GPU, then those on tensors of one element."""
    f, x = torch.nn.functional, torch.randn(64, 64)
    yield "view", lambda: x.view(-1)
    yield "transpose", lambda: x.transpose(0, 1)
    yield "slice", lambda: x[:5]
    one, other, i = torch.randn(1, 1), torch.randn(1, 1), torch.zeros(1, dtype=torch.int64)
    b, many = torch.randn(1), [torch.randn(1) for _ in range(TENSORS)]
    identity = torch.nn.Identity()
    yield "python_call", lambda: None
    yield "module_call", lambda: identity(one)
    yield "cpu_add", lambda: one + other
    yield "cpu_mul", lambda: one * other
    yield "cpu_add_inplace", lambda: one.add_(other)
    yield "cpu_relu", lambda: torch.relu(one)
    yield "cpu_gelu", lambda: f.gelu(one)
    yield "cpu_to", lambda: one.to(torch.bfloat16)
    yield "cpu_mm", lambda: one @ other
    yield "cpu_linear", lambda: f.linear(one, other, b)
    yield "cpu_bmm", lambda: torch.bmm(one[None], other[None])
    yield "cpu_layer_norm", lambda: f.layer_norm(one, (1,), b, b)
    yield "cpu_softmax", lambda: one.softmax(-1)
    yield "cpu_sum", lambda: one.sum()
    yield "cpu_mean", lambda: one.mean(-1)
    yield "cpu_embedding", lambda: f.embedding(i, other)
    yield "cpu_index", lambda: one[i]
    yield "cpu_cat", lambda: torch.cat([one, other])
    yield "cpu_stack", lambda: torch.stack([one, other])
    yield "cpu_clone", lambda: one.clone()
    yield "cpu_zeros", lambda: torch.zeros(1)
    yield "cpu_empty", lambda: torch.empty(1)
    yield "cpu_dropout", lambda: f.dropout(one, 0.1)
    yield "cpu_foreach_add", lambda: torch._foreach_add_(many, many)
    yield "cpu_adam", _adam(torch)
    yield "cpu_step", _tiny_step(torch)


def _adam(torch: Any) -> Call:
    """A step of Adam for some tensors of one element."""
    tensors = [torch.nn.Parameter(torch.randn(1)) for _ in range(TENSORS)]
    for t in tensors:
        t.grad = torch.ones(1)
    step: Call = torch.optim.Adam(tensors, foreach=True).step
    return step


def _tiny_step(torch: Any) -> Call:
    """A training step of a small model with modules, a backward pass and an optimizer, on almost no data."""
    nn = torch.nn
    parts = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model, x = nn.Sequential(*parts, nn.Linear(4, 1)), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _backward(torch: Any) -> Iterator[tuple[str, Timer]]:
    """Chains run backwards, timed per node: nodes that run nothing or a view, and two that compute. Beside a GPU a node
    also looks after streams: these are no measure of that."""
    x, one, w = (torch.randn(n, n, requires_grad=True) for n in (64, 1, 1))
    yield "cpu_backward_add", lambda: _chain(x, lambda h: h + 1.0)
    yield "cpu_backward_view", lambda: _chain(x, lambda h: h.view(64, 64))
    yield "cpu_backward_mul", lambda: _chain(one, lambda h: h * 1.01)
    yield "cpu_backward_mm", lambda: _chain(one, lambda h: h @ w)


def launching_timers(torch: Any, device: str, wait: Call) -> dict[str, Timer]:
    """Calls that launch kernels: the GPU has done with all before a loop starts."""
    calls = {_figure(op): _timer(call, time.perf_counter, wait) for op, call in small_ops(torch, device).items()}
    x, w = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))
    nodes = backward_ops(torch, w)
    return calls | {_figure(n): partial(_chain, x, grow, time.perf_counter, wait) for n, grow in nodes.items()}


def _figure(op: str) -> str:
    return cost_name(op).removesuffix("_us")


def _nothing() -> None:
    """There is no GPU to wait for."""


def _chain(first: Any, grow: Callable[[Any], Any], now: Clock = clock, wait: Call = _nothing) -> list[float]:
    """Microseconds per node of some backward passes."""
    out = []
    for _ in range(LOOPS):
        h = first
        for _ in range(CHAIN):
            h = grow(h)
        loss = h.sum()
        wait()
        start = now()
        loss.backward()
        out.append(1e6 * (now() - start) / CHAIN)
        wait()
        first.grad = None
    return out


def _timer(call: Call, now: Clock = clock, wait: Call = _nothing) -> Timer:
    """Times some loops of a call, each so short that other work seldom falls into it; microseconds per call."""
    for _ in range(10):
        call()
    wait()
    start = now()
    call()
    count = max(1, min(1000, int(SECONDS / max(now() - start, 1e-7))))

    def loops() -> list[float]:
        out = []
        for _ in range(LOOPS):
            wait()
            start = now()
            for _ in range(count):
                call()
            out.append(1e6 * (now() - start) / count)
        wait()
        return out

    return loops


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


# ---- the file


def processor() -> str:
    """The processor's name as the operating system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "unknown"


def host_toml(us: Mapping[str, float], name: str, source: str, date: str) -> str:
    """The text of a host's file."""
    lines = [
        "# A host: what single calls cost its processor, in microseconds (fastest tenth of many loops).",
        "# presage predict --host THIS_FILE scales the host times of the reference (presage hosts h200_host) by it.",
        f"version = {VERSION}",
        f"name = {json.dumps(name)}",
        f"processor = {json.dumps(processor())}",
        "",
        "[[figures]]",
        f"source = {json.dumps(source)}",
        f"date = {json.dumps(date)}",
        f"cpus = {os.cpu_count() or 1}",
        *(f"{key} = {value:.4g}" for key, value in us.items()),
    ]
    return "\n".join(lines) + "\n"


def calibrate_host(out: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure this machine's host and write its file; what was measured, in plain values."""
    if out.suffix != ".toml":
        raise PresageError(f"--host {out}: the file of a host ends in .toml, such as --host my_host.toml")
    check_writable(out)
    try:
        import torch
    except ModuleNotFoundError as e:
        raise PresageError(
            "measuring a host needs torch (its CPU build is enough): pip install 'presage[torch]'"
        ) from e
    start = time.perf_counter()
    us, busy = measure_host(torch, tell)
    seconds = time.perf_counter() - start
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    near = f" beside one {gpu}" if gpu else ""
    source = f"presage calibrate --host: torch {torch.__version__}, Python {platform.python_version()}"
    source += f"; {gpu or 'no GPU'}{'; its pace changed meanwhile' if busy else ''}"
    name = f"{os.cpu_count() or 1} CPUs of {processor()}{near}"
    write_whole(out, host_toml(us, name, source, time.strftime("%Y-%m-%d")).encode())
    return {"kind": "host", "out": os.fspath(out), "name": name, "gpu": gpu, "busy": busy, "seconds": seconds, "us": us}
