"""Run the placement study and write the figures of docs/placement.md and docs/placement.svg.

    python docs/make_placement.py DATA      # the folder that holds variability/

The text of the page is kept; what stands between two `<!-- NAME -->` marks is written anew.
"""

from __future__ import annotations

import re
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slow_stage import MovedStage, move_slow_stage

from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.configs.models import preset
from presage.hardware import platform
from presage.parallel.pipeline import Schedule
from presage.parallel.plan import ParallelPlan
from presage.placement import GpuFleet, HotNode, PlacementResult, hot_node_cost, place, read_speeds
from presage.placement.placement_score import PlacementScore, ReplicaTimes, without_gpu_spread
from presage.prediction.draws import step_model
from presage.prediction.draws.distribution import belief_of

DOCS = Path(__file__).resolve().parent
PAGE, PLOT = DOCS / "placement.md", DOCS / "placement.svg"
JOBS = DOCS.parent / "examples" / "jobs"
SLOW, HEAVY = 1.2, 1.3
NODE = 4  # GPUs, of these fleets
CHUNKS = 2  # of an interleaved schedule
FACTORS = (1.1, 1.2, 1.3, 1.4, 1.5)
FLEETS = (
    ("sgemm-longhorn-agg.csv", "392 V100, SGEMM"),
    ("resnet-longhorn-agg.csv", "336 V100, ResNet-50"),
    ("frontera-resnet-agg.csv", "296 RTX 5000, ResNet-50"),
    ("frontera-bert-agg.csv", "276 RTX 5000, BERT"),
)
SPEC = {
    (8, 8, 1.0): (1.013, 1.061, 1.100, 1.086), (8, 32, 1.0): (1.114, 1.134, 1.148, 1.031),
    (16, 16, 1.0): (1.006, 1.051, 1.095, 1.088), (16, 64, 1.0): (1.108, 1.127, 1.144, 1.033),
    (8, 8, 1.3): (1.011, None, 1.119, 1.107), (8, 32, 1.3): (1.004, None, 1.171, 1.166),
    (16, 16, 1.3): (1.006, None, 1.116, 1.110), (16, 64, 1.3): (1.002, None, 1.170, 1.168),
}  # fmt: skip


# ---- a slow stage


def slow_stages() -> list[MovedStage]:
    kinds = (("1f1b", 1), ("interleaved", CHUNKS), ("gpipe", 1))
    sizes = [(s, m * s) for s in (8, 16) for m in (1, 2, 4)]
    runs = [(k, v, s, m, h) for k, v in kinds for s, m in sizes for h in (1.0, HEAVY) if k != "gpipe" or s == 8]
    return [move_slow_stage(Schedule.of(k, s, m, v), SLOW, h) for k, v, s, m, h in runs]


def slow_table(found: list[MovedStage]) -> list[str]:
    out = ["| schedule | S | M | last stage | slow first | middle | last | worst / best | optimiser | of the best |",
           "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for f in found:
        s = f.schedule
        name = f"{s.kind} x{s.virtual}" if s.virtual > 1 else s.kind
        heavy = "alike" if f.heavy == 1 else f"x{f.heavy:g}"
        out.append(
            f"| {name} | {s.stages} | {s.microbatches} | {heavy} | {f.first:.3f} | {f.middle:.3f} | {f.last:.3f} | "
            f"{f.spread:.3f} | {f.found:.3f} (stage {f.chosen}) | {f.found / f.p95.min():.4f} |"
        )
    return out


def slow_words(found: list[MovedStage]) -> list[str]:
    """How far from the toy model's table, and the published figures."""
    large = move_slow_stage(Schedule.of("1f1b", 8, 48), 1.3, 1.3)
    formula = 1 + 48 / 55 * (1.3 * 1.3 / 1.3 - 1)
    off, count = _off(found)
    near = max(f.found / f.p95.min() - 1 for f in found)
    return [
        f"- The {count} figures of an independent toy model (1F1B, four sizes, two imbalances) are found again within "
        f"{100 * off:.2f} points.",
        "- Between the best and the worst place of one slow stage lie "
        f"{_spreads(found, '1f1b', 1.0)} in 1F1B with stages alike and {_spreads(found, '1f1b', HEAVY)} with a heavy "
        "last one; published: 8.0% to 15.6% (arXiv 2510.15596, second-hand).",
        f"- Interleaved: {_spreads(found, 'interleaved', 1.0)} and {_spreads(found, 'interleaved', HEAVY)}. GPipe: "
        f"{_spreads(found, 'gpipe', 1.0)} and {_spreads(found, 'gpipe', HEAVY)}.",
        "- A slowdown of 30% where the last stage is 30% heavier, 8 stages and 48 microbatches: "
        f"{large.spread:.3f} times between worst and best (1 + share ((1+d) h / max(1+d, h) - 1) = {formula:.3f}), one "
        "reading of the published 1.26.",
        f"- The optimiser's place is within {100 * near:.2f}% of the best in all {len(found)} pipelines.",
    ]


def _spreads(found: list[MovedStage], kind: str, heavy: float) -> str:
    spreads = [f.spread - 1 for f in found if f.schedule.kind == kind and f.heavy == heavy]
    low, high = (f"{100 * f(spreads):.1f}%" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _off(found: list[MovedStage]) -> tuple[float, int]:
    """The largest difference to the toy model's table, and how many figures that has."""
    by = {(f.schedule.stages, f.schedule.microbatches, f.heavy): f for f in found if f.schedule.kind == "1f1b"}
    pairs = [
        abs(got - want)
        for key, told in SPEC.items()
        for got, want in zip((by[key].first, by[key].middle, by[key].last, by[key].spread), told, strict=True)
        if want is not None
    ]
    return max(pairs), len(pairs)


# ---- one hot node


@dataclass(frozen=True)
class Heat:
    name: str
    gpus: int
    stages: int
    share: float  # of the step that a slow GPU slows
    hots: list[HotNode]


def heats() -> list[Heat]:
    """Example jobs that train alone, without rollouts; all GPUs alike but one node's."""
    found = []
    for path in sorted(p for p in JOBS.glob("*.toml") if "rl" not in tomllib.loads(p.read_text())):
        shape = step_model(read_transformer_job(path, {}))
        noise = without_gpu_spread(belief_of(shape.job, shape.seconds)[0].noise)
        judge = PlacementScore(ReplicaTimes(shape, noise), shape.replicas)
        alike = np.ones((shape.replicas, shape.stages))
        hots = [hot_node_cost(judge, alike, f, 8) for f in FACTORS]
        work = shape.work.sum(axis=(1, 2, 3))
        found.append(Heat(path.stem, shape.job.gpus, shape.stages, float(work[:2].sum() / work.sum()), hots))
    return found


def heat_table(found: list[Heat]) -> list[str]:
    heads = " | ".join(f"+{f - 1:.0%}" for f in FACTORS)
    out = [f"| job | GPUs | stages | slowed | {heads} |", "|---|---:|---:|---:|" + "---:|" * len(FACTORS)]
    for h in found:
        cells = " | ".join(_range(x.costs) for x in h.hots)
        out.append(f"| {h.name} | {h.gpus:,} | {h.stages} | {h.share:.0%} | {cells} |")
    return out


def _range(costs: list[float]) -> str:
    low, high = min(costs), max(costs)
    return f"{high:+.0%}" if high - low < 0.005 else f"{low:+.0%} to {high:+.0%}"


def heat_words(found: list[Heat]) -> list[str]:
    mild = [x for h in found for x in h.hots[1:4]]
    worst, best = ([f(x.costs) for x in mild] for f in (max, min))
    saved = [1 - min(h.hots[2].costs) / max(h.hots[2].costs) for h in found if h.stages > 1]
    return [
        f"A node that is 20% to 40% slow costs these jobs {min(worst):.0%} to {max(worst):.0%} in the worst stage and "
        f"{abs(min(best)):.0%} to {max(best):.0%} in the best; published for one degraded node: 9% to 35% (arXiv "
        "2510.15596, second-hand; how slow it was and where is not known). Without a pipeline there is no better "
        f"place. With one the best place saves {min(saved):.0%} to {max(saved):.0%} of what the worst costs (30% slow)."
    ]


# ---- real fleets


def fleets(data: Path) -> list[tuple[str, PlacementResult]]:
    """A job of 256 GPUs on what was measured: with all that there are, and with the slowest nodes."""
    parallel = ParallelPlan(tp=4, sequence_parallel=True, pp=8, virtual=5, schedule="interleaved", zero=1)
    job = Job(preset("llama3.1-70b"), platform("dgx-h100"), 256, 8192, 1, 256, parallel, name="llama3.1-70b")
    shape = step_model(job)
    noise = belief_of(job, shape.seconds)[0].noise
    found = []
    for file, name in FLEETS:
        fleet = read_speeds(data / "variability" / file)
        found.append((f"{name}, all offered", place(shape, fleet, noise)))
        found.append((f"{name}, slowest nodes", place(shape, _slowest_nodes(fleet, 256), noise)))
    return found


def _slowest_nodes(fleet: GpuFleet, count: int) -> GpuFleet:
    """The nodes with the slowest GPUs, and of GPUs of unknown nodes the slowest four by four: no spare."""
    known = [m for name, m in fleet.members.items() if name and len(m) == NODE]
    unknown = fleet.members.get("", np.empty(0, np.int64))
    unknown = unknown[np.argsort(-fleet.factors[unknown], kind="stable")]
    fours = [*known, *(unknown[i : i + NODE] for i in range(0, len(unknown) // NODE * NODE, NODE))]
    slowest = sorted(fours, key=lambda m: -float(fleet.factors[m].max()))[: count // NODE]
    some = np.sort(np.concatenate(slowest))
    return GpuFleet.of(fleet.factors[some], [fleet.gpus[i] for i in some], [fleet.nodes[i] for i in some])


def fleet_table(found: list[tuple[str, PlacementResult]]) -> list[str]:
    out = ["| fleet | slowest | as given | random | unlucky | best | worst | gain over random | worst / best | bound |",
           "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, p in found:
        cells = [p.given.p95.value, p.randoms.p95, p.randoms.unlucky, p.best.p95.value, p.worst.p95.value]
        out.append(
            f"| {name} | {p.fleet.factors.max():.3f} | " + " | ".join(f"{c:.3f} s" for c in cells)
            + f" | {1 - p.best.p95.value / p.randoms.p95:.1%} | {p.worst.p95.value / p.best.p95.value:.3f} | "
            f"{p.gap:.2%} |"
        )  # fmt: skip
    return out


# ---- the plot


def plot(slow: list[MovedStage], heat: list[Heat], fleet: list[tuple[str, PlacementResult]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "presage"  # the same data, the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    draw_slow(axes[0], slow)
    draw_heat(axes[1], heat)
    draw_fleets(axes[2], fleet)
    for axis in axes:
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})


def draw_slow(axis: Any, slow: list[MovedStage]) -> None:
    colors = {1: "#1f6fb4", 2: "#c8553d", 4: "#4d8c57"}
    for f in slow:
        s = f.schedule
        if s.kind == "1f1b" and s.stages == 8:
            times, even = s.microbatches // s.stages, f.heavy == 1
            label = f"M = {s.microbatches}, {'alike' if even else 'last x1.3'}"
            axis.plot(
                range(8), 100 * (f.p95 - 1), "-o" if even else "--s", color=colors[times], label=label, markersize=4
            )
    axis.set_title("One stage 20% slow, 1F1B, 8 stages: p95, %", fontsize=11)
    axis.set_xlabel("which stage is slow")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def draw_heat(axis: Any, heat: list[Heat]) -> None:
    for h in heat:
        x = [100 * (f - 1) for f in FACTORS]
        low, high = ([100 * f(hot.costs) for hot in h.hots] for f in (min, max))
        line = axis.plot(x, high, "-o", markersize=4, label=f"{h.name} ({h.stages} stages)")[0]
        axis.fill_between(x, low, high, color=line.get_color(), alpha=0.12)
    axis.axhspan(9, 35, color="#999999", alpha=0.15, zorder=0)
    axis.text(51, 10, "published range", fontsize=8, color="#555555", ha="right")
    axis.set_title("One hot node: p95, %, best to worst stage", fontsize=11)
    axis.set_xlabel("its GPUs are slower by, %")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def draw_fleets(axis: Any, fleet: list[tuple[str, PlacementResult]]) -> None:
    names = [
        name.replace(", all offered", "\nall offered").replace(", slowest nodes", "\nslowest nodes")
        for name, _ in fleet
    ]
    for i, (_, p) in enumerate(fleet):
        base = p.best.p95.value
        axis.plot([0, 100 * (p.worst.p95.value / base - 1)], [i, i], color="#bbbbbb", linewidth=3, zorder=1)
        points = (
            ("best", base, "#4d8c57"),
            ("random", p.randoms.p95, "#1f6fb4"),
            ("worst", p.worst.p95.value, "#c8553d"),
        )
        for label, value, color in points:
            axis.plot(100 * (value / base - 1), i, "o", color=color, label=label if i == 0 else None, zorder=2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_title("256 GPUs of real fleets: p95 over the best, %", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


# ---- the page


def written(text: str, name: str, lines: list[str]) -> str:
    """With other lines between the marks of a name."""
    mark = f"<!-- {name} -->"
    found, count = re.subn(f"{mark}.*?{mark}", lambda _: "\n".join([mark, *lines, mark]), text, flags=re.DOTALL)
    assert count == 1, name
    return found


def main() -> None:
    begun = time.perf_counter()
    slow, heat, fleet = slow_stages(), heats(), fleets(Path(sys.argv[1]))
    text = PAGE.read_text()
    parts = {
        "slow stages": slow_table(slow), "slow words": slow_words(slow), "hot nodes": heat_table(heat),
        "hot words": heat_words(heat), "fleets": fleet_table(fleet),
    }  # fmt: skip
    for name, lines in parts.items():
        text = written(text, name, lines)
    PAGE.write_text(text)
    plot(slow, heat, fleet)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
