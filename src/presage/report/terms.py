"""The words for what a step is made of, the same in every table, chart and sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from presage.hardware import Gpu
from presage.prediction.result import Quantiles, Result
from presage.text import amount, known_seconds, percent, seconds, size

# Kinds of work by their keys in breakdowns and noise models.
WORK = {
    "products": "GEMM",
    "attention": "attention",
    "streams": "memory-bound kernels",
    "tp": "TP communication",
    "cp": "CP communication",
    "ep": "EP communication",
    "pp": "PP communication",
    "send": "PP communication",
    "dp": "DP communication",
    "sharding": "FSDP communication",
    "bubble": "pipeline bubble",
    "host": "host",
    "optimizer": "optimizer",
    "jitter": "stragglers and jitter",
}
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "sharding")
# Parts of a step: of communication only what no computation hides.
PARTS = {k: f"{w} (exposed)" if k in COMMUNICATION else w for k, w in WORK.items() if k != "send"}
MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "working memory of a layer",
    "loss": "logits and loss",
    "buffers": "buffers",
    "outside": "CUDA context and NCCL",
}
ROLES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "activation": "activations",
    "workspace": "workspace",
}
TAIL_HELP = "Top: distribution. Bottom: chance of exceeding."
LEAST = 1e-6  # of the step: smaller parts are rounding


def part_name(key: str) -> str:
    """A part of the step in words."""
    return PARTS.get(key, key)


def work_name(key: str) -> str:
    """A kind of work in words."""
    return WORK.get(key, key)


def interval(low: float, high: float, text: Callable[[float], str] = seconds) -> str:
    """33.07-37.6 ms: the unit once where both have the same."""
    a, b = text(low), text(high)
    number, _, unit = a.rpartition(" ")
    return f"{number}-{b}" if number and b.endswith(f" {unit}") else f"{a} to {b}"


def signed(share: float, digits: int = 1) -> str:
    """+2.6%."""
    return "-" if share != share else f"{100 * share:+.{digits}f}%".replace("-0.0%", "+0.0%")


def count_text(value: float) -> str:
    """15T, 405B: parameters and tokens are counted in billions and trillions."""
    return amount(value).replace("G", "B")


def plural(count: int, noun: str) -> str:
    """1 step, 3 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def step_text(q: Quantiles) -> str:
    """35.3 ms/step (90% interval 33.1-37.6 ms): the one sentence about a step's time."""
    if q.p5 == q.p95:
        return f"{seconds(q.p50)}/step"
    return f"{step_time(q)}/step (90% interval {step_interval(q)})"


def step_time(q: Quantiles) -> str:
    """The median with the digits that are known: 35.3 ms."""
    return known_seconds(q.p50, q.p5, q.p95)


def step_interval(q: Quantiles) -> str:
    """33.1-37.6 ms."""
    return interval(q.p5, q.p95, lambda value: known_seconds(value, q.p5, q.p95))


NO_MEMORY = "memory is not known: a profiler's trace names no tensor"


def verdict(p: Result) -> str:
    """Line two of every answer about a step or a job: does it fit, and how much do steps differ?"""
    vary = f"; steps vary: p95 {signed(p.jitter)} over p50" if p.jitter > 0 else ""
    hold = "" if p.fits else "; time and cost are what they would be if it fitted"
    fit = memory_fit(p.memory_left_bytes) if p.memory_known else NO_MEMORY
    return f"{fit[0].upper()}{fit[1:]}{vary}{hold}."


def memory_fit(margin: float) -> str:
    """Whether a job or step fits in the GPU's memory, and by how much."""
    return (
        f"fits in memory with {size(margin)} to spare"
        if margin >= 0
        else f"does NOT fit in memory: {size(-margin)} too little"
    )


def first_few(names: Sequence[str], most: int = 6) -> str:
    """a, b, c and 4 more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def share_of(part: float, whole: float, what: str = "the step") -> str:
    """12.3% of the step."""
    return f"{percent(part / whole if whole else 0.0)} of {what}"


def peak_share(share: float, limit: str) -> str:
    """12.3%; above 100% with the reason: data in the L2 cache, or a clock above the one of the datasheet's peak."""
    why = "" if share <= 1 else " (from L2)" if limit == "memory" else " (boost clock)"
    return percent(share) + why


def gpu_basis(gpu: Gpu) -> str:
    """Which GPU's figures an answer rests on, and how old the newest of them are."""
    return f"Data of {gpu.name}: {max((s.date for s in gpu.facts.sources.values()), default='no date')}"


def family_name(name: str) -> str:
    """A family of ops as tables show it."""
    return "GEMM" if name == "matrix multiply" else name


# ---- durations of runs

DAY, HOUR = 86400.0, 3600.0


def span(value: float) -> str:
    """A duration in days, hours or minutes."""
    if not isfinite(value):
        return "never" if value > 0 else "-"
    for scale, unit in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
        if abs(value) >= scale:
            many = f"{value / scale:,.3g}" if abs(value) < 1e3 * scale else f"{value / scale:,.0f}"
            return f"{many} {unit if many != '1' else unit[:-1]}"
    return seconds(value)


def span_known(value: float) -> str:
    """A duration with two digits: the step time has no more."""
    text, _, unit = span(value).rpartition(" ")
    try:
        return f"{float(text.replace(',', '')):.2g} {unit}" if float(text.replace(",", "")) < 100 else f"{text} {unit}"
    except ValueError:
        return span(value)
