"""Measure a host in seconds, without a GPU: what single calls of Python, the dispatcher and autograd cost.

Every figure is the fastest tenth of short loops that take turns with those of all other calls: other work on the
machine, which comes and goes, counts little. It is processor time of the calling thread; of calls that launch kernels,
which wait for a GPU and for the autograd thread, elapsed time. Calls are those of `host` (a pack's host.json) where a
GPU is not needed; where there is one, those that launch kernels too. The file is one of `presage.hardware.host`.
Small training steps on a GPU are the mean over many processors instead, as some are slow for seconds at a time.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.files.writing import check_writable
from presage.hardware.host import STEPS, VERSION, cost_name
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
TASKS = Path("/proc/self/task")  # threads of this process, where the operating system is Linux
PLACES, PASSES = 120, 3  # where small steps run, and how often in each


def measure_host(torch: Any, tell: Callable[[str], None]) -> tuple[dict[str, float], bool, list[dict[str, float]]]:
    """Microseconds by figure, whether the host's pace changed meanwhile, and small steps by place."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timers = {name: _timer(call) for name, call in _calls(torch)} | dict(_backward(torch))
        if torch.cuda.is_available():
            timers = {**launching_timers(torch, "cuda", torch.cuda.synchronize), **timers}
        rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
        places = small_steps(torch, "cuda", torch.cuda.synchronize) if torch.cuda.is_available() else []
    finally:
        torch.set_num_threads(threads)
    near = f"on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "without a GPU"
    tell(f"{len(timers)} calls measured {near}")
    loops = {name: sorted(us for one in rounds for us in one[name]) for name in timers}
    us = {f"{name}_us": _quantile(values, FASTEST) for name, values in loops.items()}
    us |= {f"{name}_us": fmean(place[name] for place in places) for name in STEPS if places}
    slower = sorted(_quantile(values, USUAL) / _quantile(values, FASTEST) for values in loops.values())
    return us, _quantile(slower, 0.5) > BUSY, places


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
    return _trained(torch, [model], lambda: model(x))


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


def small_steps(torch: Any, device: str, wait: Call) -> list[dict[str, float]]:
    """Microseconds to issue training steps of small nets (tools/record_paced.py has them too), in many places."""
    nn, rng, places = torch.nn, random.Random(0), []
    with torch.device(device):
        mlp = [(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(0.1)) for _ in range(6)]
        conv = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(8)]
        rows, images = torch.randn(8, 64), torch.randn(2, 8, 8, 8)

    def output(blocks: Sequence[Sequence[Any]], x: Any, half: bool) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            return reduce(lambda h, block: h + reduce(lambda y, part: part(y), block, h), blocks, x)

    nets = ((mlp, rows, False), (conv, images, True))
    steps = [_trained(torch, chain(*net[0]), partial(output, *net)) for net in nets]
    for _ in range(PLACES):
        elsewhere(steps, rng)
        took = [[_elapsed(step, wait) for step in steps] for _ in range(PASSES)]
        places.append(dict(zip(STEPS, map(median, zip(*took, strict=True)), strict=True)))
    return places


def _elapsed(call: Call, wait: Call) -> float:
    """Microseconds of a call that starts with the GPU at rest."""
    wait()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _trained(torch: Any, modules: Iterable[Any], output: Callable[[], Any]) -> Call:
    """A training step of modules, for the mean square of an output."""
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        output().float().square().mean().backward()
        optimizer.step()

    return step


def elsewhere(calls: Iterable[Call], rng: random.Random) -> None:
    """Run calls, each with all threads of this process on processors drawn at random; then let them go."""
    allowed = os.sched_getaffinity(0) if TASKS.is_dir() else {0}
    for call in (*calls, _nothing):
        for path in TASKS.iterdir() if TASKS.is_dir() else ():
            with suppress(OSError):  # a thread that ended meanwhile
                os.sched_setaffinity(int(path.name), allowed if call is _nothing else {rng.choice(sorted(allowed))})
        call()


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
        "# A host: what single calls cost its processor, in microseconds (fastest tenth of loops; small steps: mean).",
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
    us, busy, places = measure_host(torch, tell)
    seconds = time.perf_counter() - start
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    near = f" beside one {gpu}" if gpu else ""
    source = f"presage calibrate --host: torch {torch.__version__}, Python {platform.python_version()}"
    source += f"; {gpu or 'no GPU'}{'; its pace changed meanwhile' if busy else ''}"
    name = f"{os.cpu_count() or 1} CPUs of {processor()}{near}"
    write_whole(out, host_toml(us, name, source, time.strftime("%Y-%m-%d")).encode())
    found = {"gpu": gpu, "busy": busy, "seconds": seconds, "us": us, "places": places}
    return {"kind": "host", "out": os.fspath(out), "name": name, **found}
