"""What if: a step before and after edits, predicted under the same luck.

graph = step_graph("train.py:build", {"batch": 8})
found = what_if(graph, ["fused_adam", "cuda_graph", mine], gpu="h200")
print(found.speedup.p50, found.memory_change, found.reason)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.capture.variants import Variant
from presage.displayed import Displayed
from presage.graph.graph import Graph
from presage.prediction.api import StepSource, step_graph
from presage.prediction.machine import Machine, capture_gpu, machine
from presage.prediction.result import Quantiles
from presage.prediction.step import DRAWS, STEPS, StepResult
from presage.whatif.edit_spec import EditSpec, ParsedEdit, parse_edits
from presage.whatif.explanation import describe_limit, edit_effect, explain_change
from presage.whatif.scenario import Scenario, scenarios
from presage.whatif.source import Capture, source_of, traced_difference
from presage.whatif.trial import Drawing, Trial, baseline_trial, edited_trial

MS = 1e3
SURE, RATHER = 0.95, 0.8  # of draws that agree on the sign
NONE = 0.01  # of a step: less is no change
KNOWN, SOMEWHAT = 0.9, 0.5  # of the new ops' GPU time that comes from models of the ops


@dataclass(frozen=True)
class Range:
    """What nine draws of ten lie between, and the middle."""

    p5: float
    p50: float
    p95: float

    @staticmethod
    def of(values: NDArray[np.float64]) -> Range:
        return Range(*map(float, np.quantile(values, [0.05, 0.5, 0.95])))


class BeforeAfter(NamedTuple):
    before: Quantiles
    after: Quantiles


@dataclass(frozen=True)
class Stage:
    """One of several edits, on top of those before it."""

    edit: str
    result: StepResult
    speedup: Range  # against the step without any


@dataclass(frozen=True, repr=False)
class WhatIf(Displayed):
    """A step before and after some edits. `speedup`: how many times as fast it is; `work`: how much more it does."""

    edits: tuple[str, ...]
    base: StepResult
    edited: StepResult
    speedup: Range
    confidence: float  # that the step gets shorter: the share of draws in which it does
    longer: float  # the share in which it gets longer
    modelled: float  # of the new ops' GPU time, the share that comes from models of the ops themselves
    limit: str  # what sets the pace of the step as it is
    because: str  # what the edits change about that
    cautions: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    work: float = 1.0
    unit: str = ""

    @property
    def step(self) -> BeforeAfter:
        return BeforeAfter(self.base.step, self.edited.step)

    @property
    def saved(self) -> float:
        """Seconds a step, of the medians."""
        return self.base.step.p50 - self.edited.step.p50

    @property
    def memory_change(self) -> int:
        return self.edited.peak_memory - self.base.peak_memory

    @property
    def fits(self) -> bool:
        return self.edited.fits

    @property
    def reason(self) -> str:
        """Why, in a sentence without its end."""
        return f"{self.limit}: {self.because}"

    @property
    def sureness(self) -> str:
        """How sure the sign of the change is (or that there is none): high, medium or low."""
        sign = max(self.confidence, self.longer)
        if self.speedup.p95 - 1 < NONE > 1 - self.speedup.p5:
            sign = 1.0
        if sign >= SURE and self.modelled >= KNOWN:
            return "high"
        return "medium" if sign >= RATHER and self.modelled >= SOMEWHAT else "low"

    @property
    def per_work(self) -> Range:
        """How many times as fast a sample (or a token) is."""
        return Range(*(x * self.work for x in asdict(self.speedup).values()))

    def frame_rows(self) -> list[dict[str, Any]]:
        """Parts of the breakdown before and after the edits."""
        before, after = self.base.breakdown, self.edited.breakdown
        parts = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in (*before, *after)}
        return [
            {"part": name, "before_seconds": a, "after_seconds": b, "change_seconds": b - a}
            for name, (a, b) in parts.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        return {
            "kind": "whatif",
            "source": self.base.source,
            "gpu": self.base.gpu,
            "base": self.base.to_json(),
            "edited": self.edited.to_json(),
            **self.short_json(),
            "steps": [_stage(s) for s in self.stages],
        }

    def short_json(self) -> dict[str, Any]:
        """Without the predictions themselves."""
        return {
            "edits": list(self.edits),
            "step_ms": {k: v * MS for k, v in asdict(self.edited.step).items()},
            "speedup": asdict(self.speedup),
            "saved_ms": self.saved * MS,
            "memory_change_bytes": self.memory_change,
            "fits": self.fits,
            "confidence": self.confidence,
            "sureness": self.sureness,
            "reason": self.reason,
            "caution": " ".join(self.cautions),
            **({"work": self.work, f"speedup_per_{self.unit}": asdict(self.per_work)} if self.unit else {}),
        }


def _stage(s: Stage) -> dict[str, Any]:
    p = s.result
    return {
        "edit": s.edit,
        "step_ms": {k: v * MS for k, v in asdict(p.step).items()},
        "speedup": asdict(s.speedup),
        "gpu_active_ms": p.gpu_active * MS,
        "host_ms": p.host * MS,
        "launches": p.launches,
        "peak_memory_bytes": p.peak_memory,
    }


def what_if(
    step: StepSource | Graph,
    edits: Iterable[EditSpec] | EditSpec,
    gpu: str | Path = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    host: str | Path | None = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
    capture: Capture = step_graph,
) -> WhatIf:
    """What edits would do to a training step: text ('fused_adam', 'checkpoint=blocks'), edits of presage.edits, or
    functions of your own, Graph -> Graph.

    `step` is FILE.py:FUNCTION with its arguments, a Graph or a saved graph's file; of those two, edits that capture the
    step again need the code at the place the graph names. Edits are applied in their order, those that change arguments
    first.
    """
    wanted = parse_edits(edits)
    scenario, how = initial_scenario(step, gpu, arguments, capture, host), Drawing(draws, steps, seed)
    base = baseline_trial(scenario, how)
    return compare(base, scenario, wanted, how)


def initial_scenario(
    step: StepSource | Graph,
    gpu: str | Path | Machine,
    arguments: Mapping[str, Any] | None,
    capture: Capture,
    host: str | Path | None = None,
) -> Scenario:
    """The step as it is."""
    where = gpu if isinstance(gpu, Machine) else machine(gpu, host)
    seen = where.kernels.gpu.key if isinstance(gpu, Machine) else capture_gpu(gpu, where)
    graph, source = source_of(step, arguments, capture, Variant(gpu=seen))
    return Scenario(graph, where, source, Variant(**graph.variant))  # type: ignore[arg-type]


def compare(base: Trial, start: Scenario, wanted: Iterable[ParsedEdit], how: Drawing, staged: bool = True) -> WhatIf:
    """The setting with all edits beside the one without; with `staged`, each edit by itself on those before."""
    edits, stages = list(wanted), list[Stage]()
    last = base
    for k, scenario in enumerate(scenarios(start, edits)):
        if staged or k == len(edits) - 1:
            last = edited_trial(scenario, how, base)
            stages.append(Stage(edits[k].text, last.result, _ratio(base, last)))
    found = edit_effect(base.timed, last.timed)
    return WhatIf(
        edits=tuple(e.text for e in edits),
        base=base.result,
        edited=last.result,
        speedup=_ratio(base, last),
        confidence=float((last.seconds < base.seconds).mean()),
        longer=float((last.seconds > base.seconds).mean()),
        modelled=last.modelled,
        limit=describe_limit(found.before),
        because=explain_change(found),
        cautions=_cautions(edits, last.timed.scenario),
        stages=tuple(stages) if staged and len(edits) > 1 else (),
        work=last.timed.scenario.work,
        unit=last.timed.scenario.unit,
    )


def _cautions(edits: Iterable[ParsedEdit], end: Scenario) -> tuple[str, ...]:
    """What to look out for; first of all, where the step's own code runs otherwise while it is traced."""
    cautions = [e.caution for e in edits]
    if end.variant.traced:
        plain = replace(end.variant, traced=False, capturable=False)
        cautions.insert(0, traced_difference(end.source.graph(plain), end.source.graph(end.variant)))
    return tuple(dict.fromkeys(c for c in cautions if c))


def _ratio(base: Trial, last: Trial) -> Range:
    """How many times as fast, draw by draw."""
    return Range.of(base.seconds / last.seconds)
