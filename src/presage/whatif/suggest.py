"""Suggestions: every edit a step has a place for, tried, ranked by what it would gain, and the best ones together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.api import StepSource, step_graph
from presage.prediction.machine import machine
from presage.prediction.step import STEPS, StepResult
from presage.whatif.before_after import WhatIf, compare, initial_scenario
from presage.whatif.edit_spec import ParsedEdit, of_kind, parse
from presage.whatif.edits import EDITS
from presage.whatif.scenario import Scenario
from presage.whatif.source import Capture
from presage.whatif.trial import Drawing, Trial, baseline_trial

DRAWS = 40
COMBINED = 3  # edits in the best combination
WORTH = 1.01  # times as fast: less is not worth an edit more
SUPPOSED = "faster"  # an edit that says what a better kernel would bring, not how to get one
COSTLIEST = 3  # kinds of ops for which that is tried
QUICK = (
    "compile", "fused_adam", "cuda_graph", "bf16", "autocast", "tf32", "fused_attention", "no_sync", "overlap",
    "channels_last", "table_batched",
)  # fmt: skip
QUICK_DRAWS = 8
LAST = ("compile", "cuda_graph")  # what other edits come before

Progress = Callable[[str, int, int], None]  # what is being tried, how many are done, of how many


@dataclass(frozen=True)
class Suggestions:
    """What was tried, the best first; `supposed` are kernels made twice as fast; and the best edits together."""

    base: StepResult
    tried: tuple[WhatIf, ...]
    supposed: tuple[WhatIf, ...]
    combination: WhatIf | None
    not_applicable: tuple[tuple[str, str], ...]  # edit, and why

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "suggestions",
            "source": self.base.source,
            "gpu": self.base.gpu,
            "base": self.base.to_json(),
            "suggestions": [s.short_json() for s in self.tried],
            "if_kernels_were_faster": [s.short_json() for s in self.supposed],
            "combination": self.combination.to_json() if self.combination else None,
            "not_applicable": [{"edit": edit, "why": why} for edit, why in self.not_applicable],
        }


def suggest(
    step: StepSource | Graph,
    gpu: str | Path = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    gpus: Sequence[str] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> list[WhatIf]:
    """Every edit that the step has a place for, the one that gains most first."""
    return list(suggestions(step, gpu, arguments, gpus=gpus, draws=draws, seed=seed, combine=0).tried)


def suggestions(
    step: StepSource | Graph,
    gpu: str | Path = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    host: str | Path | None = None,
    gpus: Sequence[str] = (),
    combine: int = COMBINED,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
    capture: Capture = step_graph,
    tell: Progress = lambda _what, _done, _all: None,
) -> Suggestions:
    """Every edit by itself, also other GPUs (`gpus`), then up to `combine` of them together."""
    scenario, how = initial_scenario(step, gpu, arguments, capture, host), Drawing(draws, steps, seed)
    base = baseline_trial(scenario, how)
    search = _Search(base, scenario, how, tell)
    candidates = [*_candidates(), *(edit for name in gpus for edit in parse(f"gpu={name}"))]
    tried, missing = search.each(candidates)
    supposed, _ = search.each(_faster(base))
    own = [(e, w) for e, w in tried if not (e.machine or e.argument) and w.work == 1]
    best = search.together(own, combine) if combine > 1 else None
    return Suggestions(base.result, _found(tried), _found(supposed), best, tuple(missing))


def next_edits(p: StepResult, most: int = 3) -> tuple[WhatIf, ...]:
    """The edits that would gain a predicted step most, from a few draws of the usual candidates: within seconds."""
    where = replace(machine(p.basis.gpu.key), host=p.basis.program.host)
    scenario, how = initial_scenario(p.graph, where, None, step_graph), Drawing(QUICK_DRAWS, STEPS, 0)
    names = (*QUICK, *(() if p.fits else ("checkpoint",)))
    search = _Search(baseline_trial(scenario, how), scenario, how, lambda _what, _done, _all: None)
    tried, _ = search.each([e for e in _candidates() if e.text in names])
    return tuple(w for w in _found(tried) if _worth(w, 1.0) or (w.fits and not p.fits))[:most]


def _found(pairs: Sequence[tuple[ParsedEdit, WhatIf]]) -> tuple[WhatIf, ...]:
    return tuple(found for _, found in pairs)


def _candidates() -> list[ParsedEdit]:
    return [of_kind(edit, value) for edit in EDITS.values() if edit.name != SUPPOSED for value in edit.tried]


def _faster(base: Trial) -> list[ParsedEdit]:
    """The ops that cost most, each kind twice as fast."""
    if SUPPOSED not in EDITS:
        return []
    cost: dict[str, float] = {}
    for op, time in zip(base.timed.scenario.graph.ops, base.timed.times, strict=True):
        cost[op.name] = cost.get(op.name, 0.0) + time.seconds
    names = sorted((n for n, seconds in cost.items() if seconds > 0), key=lambda n: -cost[n])[:COSTLIEST]
    return [of_kind(EDITS[SUPPOSED], f"{re.escape(name)}:2") for name in names]


@dataclass(frozen=True)
class _Search:
    base: Trial
    scenario: Scenario
    how: Drawing
    tell: Progress

    def each(self, edits: Sequence[ParsedEdit]) -> tuple[list[tuple[ParsedEdit, WhatIf]], list[tuple[str, str]]]:
        """Every edit by itself, best first, and those that cannot be."""
        found, missing = [], []
        for k, edit in enumerate(edits):
            self.tell(edit.text, k, len(edits))
            try:
                found.append((edit, self._one([edit])))
            except PresageError as e:
                missing.append((edit.text, str(e).removeprefix(f"{edit.text}: ")))
        return sorted(found, key=lambda pair: _rank(pair[1])), missing

    def together(self, tried: Sequence[tuple[ParsedEdit, WhatIf]], most: int) -> WhatIf | None:
        """The best edit, then again and again the one that gains most on top; None if fewer than two do."""
        if not tried or not _worth(tried[0][1], 1.0):
            return None
        chosen, best = [tried[0][0]], tried[0][1]
        while len(chosen) < most:
            rest = [e for e, _ in tried if e not in chosen]
            more = self._best_of([_ordered([*chosen, e]) for e in rest])
            if more is None or not _worth(more[1], best.speedup.p50):
                break
            chosen, best = more
        return compare(self.base, self.scenario, chosen, self.how) if len(chosen) > 1 else None

    def _best_of(self, groups: Sequence[list[ParsedEdit]]) -> tuple[list[ParsedEdit], WhatIf] | None:
        found = []
        for k, group in enumerate(groups):
            self.tell(", ".join(e.text for e in group), k, len(groups))
            try:
                found.append((group, self._one(group)))
            except PresageError:
                continue
        return min(found, key=lambda pair: _rank(pair[1]), default=None)

    def _one(self, edits: Sequence[ParsedEdit]) -> WhatIf:
        return compare(self.base, self.scenario, edits, self.how, staged=False)


def _ordered(edits: list[ParsedEdit]) -> list[ParsedEdit]:
    """Those that take the whole step as it is come last."""
    return sorted(edits, key=lambda e: LAST.index(e.text) + 1 if e.text in LAST else 0)


def _rank(found: WhatIf) -> tuple[bool, float]:
    """What fits in memory first, then the least time per sample."""
    return not found.fits, found.edited.step.p50 / found.work


def _worth(found: WhatIf, than: float) -> bool:
    return found.fits and found.speedup.p50 > WORTH * than
