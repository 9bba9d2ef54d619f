"""Search the best plan of two models at every number of GPUs and write docs/scaling.md and docs/scaling.svg.

    python docs/make_scaling.py [WORKERS]

Every point is a search of `presage plan`: the knobs below are left open, the others are held fast (see `KEEP`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from presage.configs.frameworks import framework
from presage.configs.job import Job
from presage.configs.models import preset
from presage.hardware import platform
from presage.prediction.jobs.job_prediction import JobResult
from presage.report.terms import PARTS
from presage.search import job_plan, overheads, parse_keep, plan_words, search

DOCS = Path(__file__).resolve().parent
PAGE, PLOT = DOCS / "scaling.md", DOCS / "scaling.svg"
PLATFORM = "dgx-h100"
GPUS = [2**k for k in range(3, 17)]
KEEP = ["micro_batch=1,micro_batch=2,micro_batch=4", "sharding=zero1,sharding=zero2,sharding=fsdp", "cp=1,cp=2"]
GIB = 1024.0**3


class Model(NamedTuple):
    key: str
    name: str
    sequence: int
    weak: float  # samples a GPU
    most: int  # samples a step at most
    strong: int  # samples a step
    keep: list[str]
    color: str


MODELS = [
    Model("llama3.1-405b", "Llama 3.1 405B, dense", 8192, 1 / 8, 8192, 2048, ["cp=4"], "#1f6fb4"),
    Model("deepseek-v3", "DeepSeek-V3 671B, mixture of experts", 4096, 1.0, 16384, 16384, ["expert_tp=1"], "#c8553d"),
]


class Point(NamedTuple):
    """One search."""

    gpus: int
    batch: int
    best: JobResult | None
    legal: int
    smallest: float


def point(model: Model, gpus: int, batch: int, workers: int) -> Point:
    place = platform(PLATFORM)
    software = framework("megatron-core", place.gpu)
    job = Job(preset(model.key), place, gpus, model.sequence, 1, batch, overlap=software.overlap, framework=software)
    found = search(job, gpus, keep=parse_keep(KEEP + model.keep), workers=workers, top=1)
    return Point(gpus, batch, found.best[0] if found.best else None, found.counts.legal, found.counts.smallest)


def curves(model: Model, workers: int) -> dict[str, list[Point]]:
    """Weak scaling, where the batch grows with the GPUs, and strong scaling, where it stays."""
    grown = [min(model.most, max(1, int(g * model.weak))) for g in GPUS]
    weak = [point(model, g, b, workers) for g, b in zip(GPUS, grown, strict=True)]
    known = {(p.gpus, p.batch): p for p in weak}
    strong = [known.get((g, model.strong)) or point(model, g, model.strong, workers) for g in GPUS]
    return {"weak": weak, "strong": strong}


# ---- the page


def page(found: dict[str, dict[str, list[Point]]]) -> str:
    lines = [HEAD, "", "![Scaling curves](scaling.svg)", "", DOTTED, ""]
    for model in MODELS:
        weak, strong = found[model.key]["weak"], found[model.key]["strong"]
        lines += [f"## {model.name}", "", *sentences(model, weak, strong), ""]
        lines += [f"Weak scaling: {grows(model)}.", "", *table(weak), ""]
        lines += [f"Strong scaling: {model.strong:,} samples a step ({tokens(model, model.strong)}).", ""]
        lines += [*table(strong), ""]
    return "\n".join([*lines, TAIL])


HEAD = """# Scaling: 8 to 65,536 GPUs

How far does a model scale, and with which plan? Each point below is a search of all plans of Megatron-Core in bf16 on
NVIDIA DGX H100 nodes, eight GPUs each, and the best plan found: see [plan](plan.md). The batch either grows with the
GPUs (weak scaling) or stays (strong scaling). These are predictions; what they are worth is in
[accuracy](accuracy.md). Failures and stragglers are not in them."""

DOTTED = "Dotted: in proportion to the GPUs, from where a fixed batch makes best use of them."

TAIL = """## How it was made

    python docs/make_scaling.py

The searches leave open tensor, pipeline and expert parallelism, the schedule and its chunks, context parallelism of 1
or 2 (and 4 for the dense model), microbatches of 1, 2 or 4 samples, ZeRO-1, ZeRO-2 or FSDP, and recomputation.
`presage plan` alone leaves more open.
"""


def grows(model: Model) -> str:
    per = f"a sample for every {round(1 / model.weak)} GPUs" if model.weak < 1 else "a sample for every GPU"
    return f"{per}, up to {tokens(model, model.most)} a step"


def tokens(model: Model, batch: int) -> str:
    return f"{batch * model.sequence / 1e6:.1f} M tokens"


def table(points: list[Point]) -> list[str]:
    out = ["| GPUs | samples | step | tokens/s/GPU | MFU | memory | compute | most lost to | plan |",
           "|---:|---:|---:|---:|---:|---:|---:|---|---|"]  # fmt: skip
    for p in points:
        start = f"| {p.gpus:,} | {p.batch:,} |"
        if p.best is None:
            out.append(f"{start} | | | | | | {nothing(p)} |")
            continue
        b = p.best
        lost = overheads(b)[:1]
        most = f"{PARTS.get(lost[0][0], lost[0][0])} {lost[0][1] / b.seconds:.0%}" if lost else "-"
        out.append(
            f"{start} {b.seconds:.3g} s | {b.tokens_per_second_per_gpu:,.0f} | {b.mfu:.1%} | "
            f"{b.memory.needed / GIB:.0f} GiB | {b.compute / b.seconds:.0%} | {most} | "
            f"`{plan_words(job_plan(b.job))}` |"
        )
    return out


def nothing(p: Point) -> str:
    if not p.legal:
        return "no legal plan: more replicas than samples"
    return f"none fits: the most frugal of {p.legal:,} needs {p.smallest / GIB:.0f} GiB a GPU"


def sentences(model: Model, weak: list[Point], strong: list[Point]) -> list[str]:
    """What the curves say."""
    runs = [(p, p.best) for p in weak if p.best is not None]
    steps = [(p, p.best) for p in strong if p.best is not None]
    (first, _), (top, best), (last, far) = runs[0], max(runs, key=lambda r: r[1].mfu), runs[-1]
    (low, slow), (high, quick) = max(steps, key=lambda r: r[1].mfu), steps[-1]
    more, speedup = high.gpus / low.gpus, slow.seconds / quick.seconds
    return [
        f"It fits from {first.gpus:,} GPUs on. With a growing batch its MFU is best at {top.gpus:,} GPUs "
        f"({best.mfu:.1%}, {best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU), and {far.mfu:.1%} at {last.gpus:,} "
        f"({far.tokens_per_second_per_gpu:,.0f}).",
        f"With {model.strong:,} samples a step it is best at {low.gpus:,} GPUs ({slow.mfu:.1%}); {more:,.0f} times as "
        f"many make a step {speedup:,.3g} times as fast, {slow.seconds:.3g} s to {quick.seconds:.3g} s: "
        f"{speedup / more:.0%} of what they could.",
    ]


# ---- the plot


def plot(found: dict[str, dict[str, list[Point]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "presage"  # the same data, the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    panels = [
        ("MFU", lambda b: 100 * b.mfu, "% of bf16's peak"),
        ("Throughput", lambda b: b.tokens_per_second_per_gpu, "tokens/s/GPU"),
        ("Step time", lambda b: b.seconds, "s"),
    ]
    for axis, (title, value, unit) in zip(axes, panels, strict=True):
        for model in MODELS:
            for kind, style in (("weak", "-o"), ("strong", "--s")):
                draw(axis, found[model.key][kind], value, style, model, kind)
        dress(axis, title, unit)
    for axis in axes[:2]:
        axis.set_ylim(0)
    axes[2].set_yscale("log")
    ideal(axes[2], found)
    unfit(axes[0], found)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def draw(axis: Any, points: list[Point], value: Any, style: str, model: Model, kind: str) -> None:
    there = [(p.gpus, value(p.best)) for p in points if p.best is not None]
    label = f"{model.name.split(',')[0]}, {kind} scaling"
    filled = model.color if kind == "weak" else "white"
    axis.plot(*zip(*there, strict=True), style, color=model.color, label=label, markersize=4.5, markerfacecolor=filled)


def dress(axis: Any, title: str, unit: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xlim(GPUS[0] * 0.8, GPUS[-1] * 1.3)
    axis.set_xticks(GPUS[::2], [f"{g:,}" for g in GPUS[::2]], rotation=45, fontsize=8)
    axis.set_title(f"{title}, {unit}", fontsize=11)
    axis.set_xlabel("GPUs")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def ideal(axis: Any, found: dict[str, dict[str, list[Point]]]) -> None:
    """In proportion to the GPUs, from where a fixed batch makes best use of them."""
    for model in MODELS:
        runs = [(p.gpus, p.best) for p in found[model.key]["strong"] if p.best is not None]
        gpus, best = max(runs, key=lambda r: r[1].mfu)
        ends = [gpus, GPUS[-1]]
        axis.plot(ends, [best.seconds, best.seconds * gpus / GPUS[-1]], ":", color="#777777", linewidth=1.2, zorder=0)


def unfit(axis: Any, found: dict[str, dict[str, list[Point]]]) -> None:
    """Where nothing is drawn."""
    first = [next(p.gpus for p in found[m.key]["weak"] if p.best is not None) for m in MODELS]
    short = [m.name.split(",")[0].split()[-1] for m in MODELS]
    said = "\n".join(f"{name}: {gpus} or more" for name, gpus in zip(short, first, strict=True))
    axis.text(GPUS[0], 2, f"fewer GPUs have\ntoo little memory\n{said}", fontsize=8, color="#666666", va="bottom")


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    begun = time.perf_counter()
    found = {}
    for model in MODELS:
        found[model.key] = curves(model, workers)
        print(f"{model.key}: {time.perf_counter() - begun:.0f} s")
    PAGE.write_text(page(found))
    plot(found, PLOT)


if __name__ == "__main__":
    main()
