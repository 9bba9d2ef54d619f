"""The claims on what a change is worth: predicted speed-ups beside those a GPU measured, pair by pair.

A pair is a training step and an edit of it. The edit is made around the unchanged code of the step, or in its graph,
and both are predicted. What counts is how much of the step's time the edit saves, in points:
100 (1 - edited / base), and the right sign wherever the measured step changes by more than 3%. The ratio of the
two steps, the same for GPU time alone (which hardly varies between runs), and peak memory are told beside it.

A pair measured in several runs counts with the median ratio; how far the runs are from it is the measurement's own
noise. A pair is the GPU's where both its steps keep the GPU at work for more than 93% of the time, else the host's.
No constant of the edits was fitted to pairs, but for the host cost of compiled code and the work of its kernels
(`compile/decoder`, `encoder`, `mlp` and `unet`). Those are of the group `development`, as are pairs whose kernels were
looked at to mend the rules of an edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import InputError, PresageError
from presage.files.decoding import decode_json, read_checked
from presage.graph.graph import Graph
from presage.pool.pool import SERIAL, Pool
from presage.prediction.step import GPU_BOUND
from presage_validation.score import AccuracyResult, Row, run_cases

EFFECT = 0.03  # of the step's time: smaller effects have no sign to get right
DEVELOPMENT = (
    "compile/decoder", "compile/encoder", "compile/mlp", "compile/unet", "compile/bert_base_b32_s512_amp",
    "compile/vit_b_b64_amp", "compile/resnet50_b256_amp_cl", "fused_chains/by_hand", "fused_chains/by_hand_wide",
)  # fmt: skip
DRAWS = 100
Tell = Callable[[str], None]


Above0 = Annotated[float, msgspec.Meta(gt=0)]


class Side(msgspec.Struct, frozen=True):
    """One step of a pair as measured."""

    step_ms: Above0
    gpu_active_ms: Above0
    peak_bytes: float


class Run(msgspec.Struct, frozen=True):
    edit: str
    base: Side | None = None
    changed: Side | None = None
    speedup: Above0 | None = None  # median of ratios of blocks measured one after the other
    failed: str = ""


@dataclass(frozen=True)
class MeasuredEdit:
    """A pair as its runs saw it."""

    name: str
    edit: str
    runs: tuple[tuple[Side, Side, float], ...]  # base, changed, speed-up

    @property
    def speedup(self) -> float:
        return float(np.median([r[2] for r in self.runs]))

    @property
    def gpu_speedup(self) -> float:
        return float(np.median([b.gpu_active_ms / c.gpu_active_ms for b, c, _ in self.runs]))

    @property
    def memory(self) -> float:
        """Bytes that the peak changes by."""
        return float(np.median([c.peak_bytes - b.peak_bytes for b, c, _ in self.runs]))

    @property
    def base_memory(self) -> float:
        return float(np.median([b.peak_bytes for b, _, _ in self.runs]))

    @property
    def bound(self) -> str:
        busy = [s.gpu_active_ms / s.step_ms for b, c, _ in self.runs for s in (b, c)]
        return "gpu-bound" if np.median(busy[::2]) > GPU_BOUND < np.median(busy[1::2]) else "host-bound"

    @property
    def noise(self) -> float | None:
        """Points between a run and the median of the runs, at most."""
        if len(self.runs) < 2:
            return None
        return max(abs(points_saved(r[2]) - points_saved(self.speedup)) for r in self.runs)


@dataclass(frozen=True)
class ScoredEdit:
    """A pair predicted and measured."""

    measured: MeasuredEdit
    speedup: float
    low: float
    high: float  # nine draws of ten lie between
    gpu_speedup: float
    memory: float  # bytes that the peak changes by
    reason: str

    @property
    def points(self) -> float:
        """Predicted less measured, of the time saved."""
        return points_saved(self.speedup) - points_saved(self.measured.speedup)

    @property
    def has_effect(self) -> bool:
        return abs(1 / self.measured.speedup - 1) > EFFECT

    @property
    def right_sign(self) -> bool:
        return (self.speedup > 1) == (self.measured.speedup > 1)

    @property
    def inside(self) -> bool:
        return self.low <= self.measured.speedup <= self.high

    def to_json(self) -> dict[str, Any]:
        m = self.measured
        return {
            "pair": m.name, "edit": m.edit, "bound": m.bound, "predicted": self.speedup, "measured": m.speedup,
            "p5": self.low, "p95": self.high, "points": self.points, "noise_points": m.noise, "runs": len(m.runs),
            "gpu_predicted": self.gpu_speedup, "gpu_measured": m.gpu_speedup,
            "memory_predicted_bytes": self.memory, "memory_measured_bytes": m.memory, "reason": self.reason,
        }  # fmt: skip


def points_saved(speedup: float) -> float:
    """Points of the step's time that a speed-up saves."""
    return 100 * (1 - 1 / speedup)


@dataclass(frozen=True)
class PairResult(AccuracyResult):
    """Rows of ratios, and the pairs themselves."""

    pairs: tuple[ScoredEdit, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        groups = {g: rates(some) for g, some in self.parts().items()}
        out = super().to_json() | {"n": len(self.pairs), "pairs": [p.to_json() for p in self.pairs]}
        out["groups"] = {g: out["groups"].get(g, {}) | rates for g, rates in groups.items()}
        return out

    def lines(self) -> list[tuple[str, ...]]:
        """A header and every pair, for a file."""
        rows = [p.to_json() for p in self.pairs]
        return [tuple(rows[0]), *(tuple(map(str, row.values())) for row in rows)] if rows else []

    def parts(self) -> dict[str, list[ScoredEdit]]:
        """The pairs by bound, by edit, and those that were used for development."""
        out: dict[str, list[ScoredEdit]] = {}
        for p in self.pairs:
            for group in _groups(p.measured):
                out.setdefault(group, []).append(p)
        return out


def _groups(m: MeasuredEdit) -> tuple[str, ...]:
    edit = m.name.partition("/")[0]
    return (m.bound, edit, *(("development",) if m.name in DEVELOPMENT else ()))


def score_whatif(paths: Sequence[str | Path], tell: Tell = lambda _: None, pool: Pool = SERIAL) -> PairResult:
    """Python files with PAIRS (or CASES, for pairs called EDIT/CASE), and files or folders of measured pairs."""
    files = [Path(p) for p in paths]
    sources = [p for p in files if p.suffix == ".py"]
    if not sources or len(sources) == len(files):
        raise PresageError("accuracy whatif takes PAIRS.py and the measured pairs: a .json file or a folder of them")
    measured = measured_pairs(p for p in files if p.suffix != ".py")
    steps = _Steps.of(sources)
    pieces = steps.alike(measured.values())
    done, failed = run_cases(partial(_scored, steps), (), tell, lambda m: m.name, pool, pieces)
    scored, reasons = {m.name: p for m, p in done}, {s.row: s for s in failed}
    found = [scored[name] for name in measured if name in scored]
    skipped = [reasons[name] for name in measured if name in reasons]
    rows = tuple(row for p in found for row in _rows(p))
    told = " ".join(map(str, paths))
    return PairResult("whatif", told, rows, tuple(skipped), rates(found), pairs=tuple(found))


def measured_pairs(paths: Iterable[str | Path]) -> dict[str, MeasuredEdit]:
    """The pairs of some files of runs, those of one name together. A run in which a pair failed does not count."""
    runs: dict[str, list[Run]] = {}
    for file in _files(paths):
        for name, run in _read(file).items():
            runs.setdefault(name, []).append(run)
    out = {}
    for name, some in runs.items():
        sides = tuple((r.base, r.changed, _speedup(r)) for r in some if r.base and r.changed)
        if sides:
            out[name] = MeasuredEdit(name, some[-1].edit, sides)
    return out


def _speedup(run: Run) -> float:
    assert run.base and run.changed
    return run.speedup or run.base.step_ms / run.changed.step_ms


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        inside = sorted(path.glob("run*.json")) if path.is_dir() else [path]
        if not inside:
            raise InputError(path, "no run*.json in it: measured pairs, as tools/measure_edits.py writes them")
        yield from inside


def _read(file: Path) -> dict[str, Run]:
    found = read_checked(file, dict[str, msgspec.Raw])
    return {name: decode_json(file, raw, Run, name) for name, raw in found.items() if not name.startswith("_")}


@dataclass(frozen=True)
class _Steps:
    """Where the steps of pairs are from. Steps that several pairs share are captured once."""

    pairs: Mapping[str, tuple[str, Any]]  # by pair: its file, and (edit, base, changed)
    cases: Mapping[str, Any]  # by case, a function of the device
    files: tuple[Path, ...]
    graphs: dict[str, Graph] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[[Sequence[Path]], _Steps], tuple[tuple[Path, ...]]]:
        """Each process imports the files for itself."""
        return _Steps.of, (self.files,)

    @staticmethod
    def of(files: Sequence[Path]) -> _Steps:
        from presage.capture import load_cases
        from presage.capture.fake_device import load_value

        pairs: dict[str, tuple[str, Any]] = {}
        cases: dict[str, Any] = {}
        for file in files:
            here = load_value(file, "PAIRS")
            if isinstance(here, Mapping):
                pairs |= {name: (str(file), pair) for name, pair in here.items()}
            else:
                cases |= load_cases(file)
        return _Steps(pairs, cases, tuple(files))

    def alike(self, measured: Iterable[MeasuredEdit]) -> list[list[MeasuredEdit]]:
        """Pairs whose step is the same, together."""
        out: dict[str, list[MeasuredEdit]] = {}
        for m in measured:
            base = str(self.pairs[m.name][1][1]) if m.name in self.pairs else m.name.partition("/")[2]
            out.setdefault(base, []).append(m)
        return list(out.values())

    def edit(self, m: MeasuredEdit) -> str:
        return self.pairs[m.name][1][0] if m.name in self.pairs else m.edit

    def step(self, m: MeasuredEdit) -> tuple[str, dict[str, Any]]:
        """FILE.py:FUNCTION and its arguments; a case alone is told by its name."""
        if m.name in self.pairs:
            return f"{self.pairs[m.name][0]}:base", {"pair": m.name}
        case = m.name.partition("/")[2]
        if case not in self.cases:
            raise PresageError(f"no pair {m.name} and no case {case} in the files given")
        return case, {}

    def capture(self, step: str, arguments: Mapping[str, Any], *, variant: Variant = AS_WRITTEN) -> Graph:
        from presage.capture import capture, load

        changes = {k: v for k, v in arguments.items() if k != "pair"}
        key = step if step in self.cases else f"{self.pairs[arguments['pair']][1][1]} {changes}"
        key += f" {variant}"
        if key not in self.graphs:
            function = self.cases[step] if step in self.cases else load(step)
            self.graphs[key] = capture(function, dict(arguments), source=step, variant=variant)
        return self.graphs[key]


def _scored(steps: _Steps, m: MeasuredEdit) -> ScoredEdit:
    from presage.whatif import what_if

    step, arguments = steps.step(m)
    found = what_if(step, steps.edit(m), arguments=arguments, draws=DRAWS, capture=steps.capture)
    gpu = found.base.gpu_active / found.edited.gpu_active
    s = found.speedup
    return ScoredEdit(m, s.p50, s.p5, s.p95, gpu, float(found.memory_change), found.reason)


def _rows(p: ScoredEdit) -> Iterator[Row]:
    m, groups = p.measured, _groups(p.measured)
    yield Row("speedup", groups[0], m.name, p.speedup, m.speedup, groups[1:])
    yield Row("gpu_speedup", groups[0], m.name, p.gpu_speedup, m.gpu_speedup, groups[1:])
    yield Row("edited_memory", groups[0], m.name, m.base_memory + p.memory, m.base_memory + m.memory, groups[1:])


def rates(pairs: Sequence[ScoredEdit]) -> dict[str, float]:
    """What the bars are on, and what stands beside it."""
    if not pairs:
        return {}
    points = np.abs([p.points for p in pairs])
    ratios = np.abs([100 * (p.speedup - p.measured.speedup) for p in pairs])
    noise = [p.measured.noise for p in pairs if p.measured.noise is not None]
    signs = [p.right_sign for p in pairs if p.has_effect]
    return {
        "pairs": float(len(pairs)),
        "median_points": float(np.median(points)),
        "p90_points": float(np.quantile(points, 0.9)),
        "median_ratio_points": float(np.median(ratios)),
        "with_effect": float(len(signs)),
        "right_sign": float(np.mean(signs)) if signs else float("nan"),
        "interval_hit_rate": float(np.mean([p.inside for p in pairs])),
        "noise_points": float(np.median(noise)) if noise else float("nan"),
    }
