"""The claims on table-batched embeddings, on files of measured groups of tables.

`forward`, `backward`: the groups in the order of the file, shuffled with seed 0 and cut in half; law and correction are
fitted on the first half and scored on the second. Beside them, fitted and scored on the same halves: `_law` without the
learned correction; `_skew` knowing alpha and no histogram; `_uniform` as if rows were drawn uniformly, and `_no_reuse`
as if no row came twice: what knowing the data is worth. `_cold`: with the cache overwritten before each phase.
`_shipped`: presage as it ships, without a fit, on all groups; a note tells how many of them it was fitted on.
`_repeated`: groups timed twice, the floor.

A file of few groups is not fitted: there `forward` and `backward` are of the model as shipped, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from presage.embeddings.lookup_model import (
    MEASURED_ON,
    EmbeddingModel,
    embedding_model,
    load_lookup_parameters,
    scale_parameters,
)
from presage.embeddings.row_reuse import Lookups, zipf
from presage.hardware import Gpu, gpu
from presage_fit.embeddings import START, Measured, fit_lookups, group_hash, sample
from presage_validation.score import Result, Row
from presage_validation.tbe_files import Groups, read_groups

__all__ = ["SEED", "EmbeddingResult", "score_embeddings", "split"]

Tell = Callable[[str], None]
SEED, ENOUGH = 0, 200  # of the shuffle; groups that a file needs to be fitted
ABLATIONS: dict[str, Callable[[Measured], tuple[Lookups, ...]]] = {
    "skew": lambda g: tuple(
        zipf(t.reuse.skew(t.rows), t.rows, k.count) for t, k in zip(g.tables, g.lookups, strict=True)
    ),
    "uniform": lambda g: tuple(zipf(0.0, t.rows, k.count) for t, k in zip(g.tables, g.lookups, strict=True)),
    "no_reuse": lambda g: tuple(Lookups.all_new(k.count) for k in g.lookups),
}


@dataclass(frozen=True)
class EmbeddingResult(Result):
    """Rows of several metrics; what counts is `forward` and `backward`."""

    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"n": sum(r.metric == "forward" for r in self.rows), "notes": list(self.notes)}


def score_embeddings(path: str | Path, tell: Tell = lambda _: None) -> EmbeddingResult:
    """Score one file."""
    found = read_groups(path)
    fitted = len(found.groups) >= ENOUGH
    tell("halves" if fitted else "as shipped")
    rows = list(_halves(found, tell) if fitted else _unfitted(found))
    rows += _rows(embedding_model(found.chip), found.groups, "_shipped") if fitted else []
    rows += [Row(metric, "repeated", name, first, later) for name, metric, first, later in found.repeats]
    return EmbeddingResult("embeddings", str(path), tuple(rows), found.skipped, notes=tuple(_notes(found, fitted)))


def split(groups: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The half to fit and the half to score."""
    order = np.random.default_rng(SEED).permutation(len(groups))
    half = len(groups) // 2
    return [groups[i] for i in order[:half]], [groups[i] for i in order[half:]]


def _notes(found: Groups, fitted: bool) -> Iterator[str]:
    seen = load_lookup_parameters().seen
    known = sum(group_hash(g) in seen for g in found.groups)
    if fitted:
        half = len(found.groups) // 2
        yield f"forward, backward: fitted on {half} of {len(found.groups)} groups, the others scored (seed {SEED})"
    else:
        yield f"forward, backward: the model as shipped, for {len(found.groups)} groups are fewer than {ENOUGH}"
    yield f"as shipped: {known} of the {len(found.groups)} groups are among those it was fitted on"


def _model(chip: Gpu, groups: Sequence[Measured]) -> EmbeddingModel:
    found = fit_lookups(groups, start=scale_parameters(START, gpu(MEASURED_ON), chip))
    return EmbeddingModel(chip, found.params, {"forward": found.forward, "backward": found.backward})


def _halves(found: Groups, tell: Tell) -> Iterator[Row]:
    kept, scored = split(found.groups)
    model = _model(found.chip, kept)
    yield from _rows(model, scored)
    yield from _rows(model, scored, "_law", corrected=False)
    for name, ablated in ABLATIONS.items():
        tell(name)
        worse = _model(found.chip, [replace(g, lookups=ablated(g)) for g in kept])
        yield from _rows(worse, [replace(g, lookups=ablated(g)) for g in scored], f"_{name}")
    yield from _rows(model, scored, "_cold", cold=True)


def _unfitted(found: Groups) -> Iterator[Row]:
    model = embedding_model(found.chip)
    yield from _rows(model, found.groups)
    yield from _rows(model, found.groups, "_law", corrected=False)
    for name, ablated in ABLATIONS.items():
        yield from _rows(model, [replace(g, lookups=ablated(g)) for g in found.groups], f"_{name}")
    yield from _rows(model, found.groups, "_cold", cold=True)


def _rows(
    model: EmbeddingModel, groups: Sequence[Measured], ending: str = "", cold: bool = False, corrected: bool = True
) -> Iterator[Row]:
    total = sample(groups, model.params).totals(model.params) if groups else np.zeros((0, 1))
    for metric, of in (("forward", model.forward_of), ("backward", model.backward_of)):
        predicted: Iterable[float] = of(total, cold=cold, corrected=corrected) if groups else ()
        for g, seconds in zip(groups, predicted, strict=True):
            measured = getattr(g, f"{metric}_cold" if cold else metric)
            if np.isfinite(measured):
                label = f"{g.kind} {g.tables[0].dtype} {g.optimizer}"
                yield Row(f"{metric}{ending}", label, g.name, float(seconds), measured)
