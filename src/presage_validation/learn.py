"""The claim on kernel corrections learned from traces: some traces of a machine predict the others' GPU time.

A machine is a folder of traces (of those given, the folder below them) and a GPU. For every number of traces in `LEARN`
some are drawn, and all others are predicted with what these teach. The split: one trace, each in turn; more, `DRAWS`
random choices without repetition, seeded. Ranks of one run teach one another next to nothing new, so rows between them
count in a group of their own. Only kernels of ops that presage prices are counted: those of extensions and compilers,
of which a trace tells the time alone, would be predicted by themselves.

`models_N` begins from what presage has for the GPU, `law_N` from its laws alone, with no correction fitted on any GPU;
N is the number of traces. A GPU that was calibrated (the H200) is taken to be unlisted: it begins from the facts,
tables and carried-over corrections of the GPU that stands for its architecture (the H100).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.kernel_files import load
from presage.costs.kernel_model import CALIBRATED_ERROR
from presage.errors import InputError, PresageError
from presage.hardware import gpu
from presage.hardware.architecture import architecture
from presage.pool.pool import SERIAL, Pool
from presage.traces import kineto
from presage.traces.trace_graph import trace_graphs
from presage.traces.trace_set import kind
from presage_fit.learn import TracedCalls, graph_calls, learn, traced_gpu
from presage_validation.score import AccuracyResult, Row, Skipped, run_cases

LEARN = (1, 3, 6)
DRAWS, SEED = 20, 0
NINETY = 1.645  # standard deviations
STARTS = ("models", "law")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class LearnCase:
    """One trace: its machine, its run where it is one of several ranks, and its calls from either start."""

    name: str
    machine: str
    run: str
    models: TracedCalls
    law: TracedCalls


def score_learning(paths: Sequence[Path], tell: Tell = lambda _: None, pool: Pool = SERIAL) -> AccuracyResult:
    """Every trace with shapes among files and folders."""
    files = [found for path in paths for found in _files(path)]
    done, skipped = run_cases(_case, files, tell, lambda f: f[1], pool)
    machines: dict[str, list[LearnCase]] = {}
    for _, case in done:
        machines.setdefault(case.machine, []).append(case)
    alone = [Skipped(cases[0].name, f"the only trace of {name}") for name, cases in machines.items() if len(cases) < 2]
    rows, rates = [], _Rates()
    for cases in machines.values():
        rows += [row for row in _machine_rows(cases, rates) if len(cases) > 1]
    rates.add_from(rows)
    path = " ".join(map(str, paths))
    return AccuracyResult("learn", path, tuple(rows), (*skipped, *alone), rates.found(), _NOTES)


_NOTES = (
    "models_N, law_N: GPU time with N traces, from presage's models of the GPU or from its laws alone",
    "pairs_better_*: shares of pairs (one trace, another predicted) nearer than without it; range_90: inside the range",
)


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Each profiler's trace below a path, with its name."""
    if not path.exists():
        raise InputError(path, "no such file or folder")
    found = sorted(p for p in path.rglob("*.json*") if p.is_file()) if path.is_dir() else [path]
    root = path if path.is_dir() else path.parent
    for file in found:
        if file.name.endswith((".json", ".json.gz")) and kind(file) == "kineto":
            yield file, str(file.relative_to(root.parent))


def _case(found: tuple[Path, str]) -> LearnCase:
    try:
        return _read(*found)
    except PresageError as e:
        raise PresageError(str(e).removeprefix(f"{found[0]}: ")) from e


def _read(file: Path, name: str) -> LearnCase:
    graph, of = trace_graphs(file)[0], traced_gpu(file)
    if not of:
        raise PresageError("the trace does not name its GPU")
    try:
        key = gpu(of).key
    except PresageError as e:
        raise PresageError(f"{of} is not a GPU that is listed: which one it is cannot be told from the trace") from e
    trace, folder = kineto.read(file, ignore=["*"]), "/".join(name.split("/")[:2])
    run = str(Path(name).parent) if (trace.world or 0) > 1 else name
    base = start_models(key)
    calls = [graph_calls(graph, m, str(file), of) for m in (base, law_alone(base))]
    return LearnCase(name, f"{folder if folder != name else Path(name).parent} {key}", run, *calls)


@lru_cache(8)
def start_models(key: str) -> CalibratedKernels:
    """The models to begin from: of a calibrated GPU, those of the one that stands for its architecture."""
    models = load(key)
    return models if models.transferred else load(architecture(models.gpu.architecture).closed_form)


def law_alone(models: CalibratedKernels) -> CalibratedKernels:
    """A GPU's laws without any correction."""
    return replace(models, trees={}, counts={}, own={}, single=None, convolved=None)


def choices(count: int, taught: int) -> list[tuple[int, ...]]:
    """Which traces of `count` are learned from: each in turn, or random ones."""
    if taught == 1:
        return [(i,) for i in range(count)]
    if taught >= count:
        return []
    rng = np.random.default_rng([SEED, taught])
    return [tuple(sorted(rng.choice(count, taught, replace=False).tolist())) for _ in range(DRAWS)]


class _Rates:
    """Counts of pairs and ranges."""

    def __init__(self) -> None:
        self.inside: list[bool] = []
        self.better: dict[str, list[bool]] = {}

    def add_from(self, rows: Sequence[Row]) -> None:
        """Pairs of one trace and another, against the models alone and against the laws alone."""
        alone = {(r.metric, r.name): abs(r.error) for r in rows if r.metric in ("models_0", "law_0")}
        for r in rows:
            if r.metric != "models_1":
                continue
            of = r.name.partition(" from ")[0]
            kinds = "ranks" if ONE_RUN in r.also else "runs"
            for than in STARTS:
                nearer = abs(r.error) < alone[f"{than}_0", of]
                self.better.setdefault(f"pairs_better_than_{than}_{kinds}", []).append(nearer)
                self.better.setdefault(f"pairs_better_than_{than}_{r.group.split(' ')[-1]}", []).append(nearer)

    def found(self) -> dict[str, float]:
        out = {name: float(np.mean(seen)) for name, seen in sorted(self.better.items())}
        return out | ({"range_90": float(np.mean(self.inside))} if self.inside else {})


ONE_RUN = "ranks of one run"


def _machine_rows(cases: Sequence[LearnCase], rates: _Rates) -> Iterator[Row]:
    for start in STARTS:
        calls = [getattr(c, start) for c in cases]
        for case, found in zip(cases, calls, strict=True):
            yield Row(f"{start}_0", case.machine, case.name, found.predicted, found.seconds)
        for taught in LEARN:
            for chosen in choices(len(cases), taught):
                correction = learn([calls[i] for i in chosen])
                for i in (i for i in range(len(cases)) if i not in chosen):
                    case, found, among = cases[i], calls[i], {cases[k].run for k in chosen}
                    predicted = found.corrected(correction)
                    also = (ONE_RUN,) if case.run in among else ("other runs",)
                    name = f"{case.name} from {'+'.join(Path(cases[k].name).name for k in chosen)}"
                    yield Row(f"{start}_{taught}", case.machine, name, predicted, found.seconds, also)
                    if start == "models" and case.run not in among:
                        width = NINETY * float(np.hypot(found.error(correction), CALIBRATED_ERROR))
                        rates.inside.append(abs(np.log(found.seconds / predicted)) <= width)
