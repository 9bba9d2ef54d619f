"""The claims on kernel times: held-out shapes of a calibration pack, and published tables of many GPUs.

From a pack every family is fitted anew without a random fifth of the draws and without its largest shapes, and scored
on both. No call of a row that is scored is fitted, even where another draw has it too; how well two measurements of
one call agree is `repeated`, and the laws alone are `law`. A table is predicted with the models of its GPU, or, where
that was never calibrated, with the H200's corrections of that GPU's own laws (`transferred`), at the full clock and
with a warm cache, for tables repeat one call.

Tables of serving engines time small kernels with what surrounds them. Where engines were fitted on a GPU
(presage_fit/serving.py) `time` is of the op as they run it, `kernel` of the kernel alone. What was fitted is told
by the shape (presage_fit/table_split.py): such shapes count in `time_fitted` and nowhere else. The others are told
apart, too: those of widths that were never fitted, and those between fitted ones. Rows over 20 us, where floors matter
less, count once more in `time_over_20us`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.calibrated_kernels import CalibratedKernels, call_times
from presage.costs.families import FAMILIES
from presage.costs.kernel_files import FILE, SHIPPED, load
from presage.costs.rates import Rates
from presage.errors import InputError
from presage.hardware import Gpu, gpu
from presage.pool.pool import SERIAL, Pool
from presage_fit.kernel_models import KernelSample, SampleTable, fit_family, held_out, samples, table
from presage_fit.pack import Pack
from presage_fit.pack import read as read_pack
from presage_fit.serving import ServingOverhead, serving_overheads
from presage_fit.table_split import held_out_widths, is_fitted
from presage_validation.kernel_tables import KernelTable, MeasuredKernel, read_table
from presage_validation.score import AccuracyResult, Row, Score, Skipped, in_turn

GEOMEAN_BAR, P90_BAR = 0.05, 0.20
LONG = 20e-6
LEAST = 40  # samples that a family is fitted from
ENDINGS = (".csv", ".csv.gz")
GUESSED = ", engine guessed"  # rows of a family whose library was not asked
NEVER, BETWEEN = ", widths never fitted", ", between fitted shapes"

Tell = Callable[[str], None]
Array = npt.NDArray[Any]


def score_kernels(paths: Iterable[str | Path], tell: Tell = lambda _: None, pool: Pool = SERIAL) -> AccuracyResult:
    """Score folders of packs, and tables or folders of tables."""
    return _joined([_score(p, tell, pool) for p in map(Path, paths)])


def _joined(found: Sequence[AccuracyResult]) -> AccuracyResult:
    if len(found) == 1:
        return found[0]
    rows = tuple(r for f in found for r in f.rows)
    skipped = tuple(s for f in found for s in f.skipped)
    return AccuracyResult(
        "kernels", ", ".join(f.path for f in found), rows, skipped, notes=_notes(found), counted="time"
    )


def _notes(results: Iterable[AccuracyResult]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for r in results for n in r.notes or ()))


def _score(path: Path, tell: Tell, pool: Pool) -> AccuracyResult:
    if (path / "header.json").exists():
        return score_pack(read_pack(path), tell, pool=pool)
    if path.is_dir():
        tables = sorted(p for p in path.iterdir() if p.name.endswith(ENDINGS))
        if not tables:
            raise InputError(
                path, "neither a calibration pack (header.json) nor tables of kernel times (.csv, .csv.gz)"
            )
        found = pool.map(_file_scored, tables)
        return replace(_joined([next(found) for _ in in_turn(tables, tell, lambda p: p.name)]), path=str(path))
    if not path.exists():
        raise InputError(path, "no such file or folder")
    tell(path.name)
    return _file_scored(path)


def _file_scored(path: Path) -> AccuracyResult:
    return score_table(read_table(path))


# ---- a pack


def score_pack(
    pack: Pack, tell: Tell = lambda _: None, families: Iterable[str] | None = None, pool: Pool = SERIAL
) -> AccuracyResult:
    """Every family (or these) of a pack, fitted on the rest."""
    rates, found = Rates.of(gpu(pack.header.gpu)), samples(pack)
    asked = list(FAMILIES if families is None else families)
    few = [name for name in asked if len(found[name]) < LEAST]
    skipped = [Skipped(name, f"fewer than {LEAST} rows in the pack") for name in few]
    some = [(name, found[name]) for name in asked if name not in few]
    scored = pool.map(partial(_family_rows, rates), some)
    rows = [row for _ in in_turn(some, tell, lambda one: one[0]) for row in next(scored)]
    result = AccuracyResult("kernels", str(pack.folders[0]), tuple(rows), tuple(skipped), counted="time")
    passed = within_bars(result)
    share = {"families_within_bars": sum(passed.values()) / len(passed)} if passed else {}
    missed = [f"{n} (geomean {s.geomean:.1%}, p90 {s.p90:.1%})" for n, s in _held(result).items() if not passed[n]]
    bars = f"bars on held-out shapes: geomean {GEOMEAN_BAR:.0%}, p90 {P90_BAR:.0%}"
    note = f"{bars}: {sum(passed.values())} of {len(passed)} families within both"
    return replace(result, rates=share, notes=(note + (f"; not {', '.join(missed)}" if missed else ""),))


def _held(result: AccuracyResult) -> dict[str, Score]:
    return {g: result.metrics(g)["time"] for g in result.groups()}


def within_bars(result: AccuracyResult) -> dict[str, bool]:
    """Whether each family's held-out shapes are within both bars."""
    return {g: s.geomean <= GEOMEAN_BAR and s.p90 <= P90_BAR for g, s in _held(result).items()}


def _family_rows(rates: Rates, one: tuple[str, list[KernelSample]]) -> list[Row]:
    return list(_scored_rows(*one, rates))


def _scored_rows(name: str, some: list[KernelSample], rates: Rates) -> Iterator[Row]:
    family, data = FAMILIES[name], table(FAMILIES[name], some, rates)
    fifth, large = held_out(some, data)
    trees = fit_family(family, data.part(_apart(some, data, fifth | large)))
    predicted, scored = data.law.copy(), fifth | large
    predicted[scored] *= np.exp(trees.predict(data.x[scored].astype(np.float32)))
    guessed = np.zeros(len(scored), bool) if family.told is None else data.x[:, family.told] < 0.5
    for metric, base, keep in (("time", "law", fifth), ("time_extrapolated", "law_extrapolated", large)):
        for i in np.flatnonzero(keep):
            label = f"{_label(some[data.sample[i]])} {'cold' if data.x[i, -1] else 'warm'}"
            group = name + GUESSED if guessed[i] else name
            yield Row(metric, group, label, float(predicted[i]), float(data.seconds[i]))
            yield Row(base, group, label, float(data.law[i]), float(data.seconds[i]))
    yield from _repeats(name, some)


def _repeats(name: str, some: list[KernelSample]) -> Iterator[Row]:
    """Calls that two draws have, the later as if it were predicted by the earlier: what no model can go below."""
    first: dict[Any, KernelSample] = {}
    for s in some:
        earlier = first.setdefault(s.call.key, s)
        if earlier.draw != s.draw:
            yield Row("repeated", name, f"{_label(s)} warm", earlier.seconds, s.seconds)


def _apart(some: list[KernelSample], data: SampleTable, scored: Array) -> Array:
    """The rows that are fitted: of calls that no scored row has."""
    keys = [s.call.key for s in some]
    kept_out = {keys[i] for i in data.sample[scored]}
    return np.array([keys[i] not in kept_out for i in data.sample], np.bool_)


def _label(sample: KernelSample) -> str:
    shapes = [f"{t.dtype}{list(t.sizes)}" for t in sample.call.tensors[:4]]
    return f"{sample.call.name.removeprefix('aten::')} {' '.join(shapes)}"


# ---- a table


def models_of(chip: Gpu) -> tuple[CalibratedKernels, bool]:
    """The models of a GPU, and whether they are another's corrections of its own laws."""
    return load(chip.key), not (SHIPPED / chip.key / FILE).exists()


def score_table(
    found: KernelTable, models: Callable[[Gpu], tuple[CalibratedKernels, bool]] = models_of
) -> AccuracyResult:
    """Every shape of a table that has a model."""
    rows: list[Row] = []
    notes: list[str] = []
    ordered = sorted(found.shapes, key=lambda s: (s.gpu.key, s.kernel))
    for _, group in groupby(ordered, key=lambda s: (s.gpu.key, s.family)):
        shapes = list(group)
        chosen, transferred = models(shapes[0].gpu)
        engine = serving_overheads(shapes[0].gpu.key).get(shapes[0].family) if shapes[0].sizes else None
        rows += _shape_rows(shapes, chosen, engine, transferred)
        notes.append(_note(shapes[0].gpu, engine is not None, transferred))
    unique = tuple(n for n in dict.fromkeys(notes) if n)
    return AccuracyResult("kernels", str(found.path), tuple(rows), found.skipped, notes=unique, counted="time")


def _note(chip: Gpu, engines: bool, transferred: bool) -> str:
    if engines:
        return f"{chip.name}: ops as serving engines run them; shapes that were fitted are in time_fitted alone"
    if transferred:
        return f"{chip.name}: never calibrated; the H200's corrections of its own laws (transferred)"
    return ""


def _shape_rows(
    shapes: list[MeasuredKernel], models: CalibratedKernels, engine: ServingOverhead | None, transferred: bool
) -> Iterator[Row]:
    """Predictions beside measurements, of the kernel and, where there are engines, of the op as they run it."""
    times = call_times(models, [s.call for s in shapes])
    issue, kernel = np.array([s.issue for s in shapes]), np.array([t.warm for t in times])
    took = kernel + issue if engine is None else _as_run(shapes, kernel, models, engine)
    for s, t, seconds in zip(shapes, times, took.tolist(), strict=True):
        group = f"{s.gpu.key} {s.kernel}" + (" (transferred)" if transferred and engine is None else "")
        if engine is not None and is_fitted(s.family, s.sizes):
            yield Row("time_fitted", group, s.name, seconds, s.seconds)
            continue
        also = () if engine is None else (group + (NEVER if held_out_widths(s.family, s.sizes) else BETWEEN),)
        yield Row("time", group, s.name, seconds, s.seconds, also)
        if s.seconds > LONG:
            yield Row("time_over_20us", group, s.name, seconds, s.seconds, also)
        if engine is not None:
            yield Row("kernel", group, s.name, t.warm, s.seconds, also)
        yield Row("law", group, s.name, t.law.seconds + s.issue, s.seconds, also)
        if s.spread is not None:
            yield Row("collectors", group, s.name, s.seconds * (1 + s.spread), s.seconds, also)


def _as_run(shapes: list[MeasuredKernel], kernel: Array, models: CalibratedKernels, engine: ServingOverhead) -> Array:
    sizes = np.array([s.sizes for s in shapes])
    return engine.seconds(sizes, kernel, models.rates, [[who for who, _ in s.by] for s in shapes])
