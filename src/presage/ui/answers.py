"""Answers to a plan's text: first what is certain at once, then what draws tell. Plain values that a page can keep."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from presage.prediction.jobs.job_prediction import JobResult
from presage.report.terms import PARTS
from presage.text import amount, percent, seconds, size
from presage.ui.asked import DAY, Asked
from presage.ui.knobs import Wrong
from presage.ui.plans import predicted

if TYPE_CHECKING:
    from presage.prediction.draws.guarantee import Guarantee
    from presage.runs.whole import RunResult

__all__ = ["Measure", "run_drawn", "run_measures", "run_sentence", "step_drawn", "step_measures", "step_sentence",
           "sure_measures"]  # fmt: skip

DRAWS, RUNS, FEWEST = 4000, 500, 500
STAGES, MOST = 64, 128  # of a pipeline whose steps are drawn so often; and those that are drawn here at all
YEAR, LONG = 365.25 * DAY, 30  # a run of more years than that is none
SEED = 0


class Measure(NamedTuple):
    """A number that plans are compared by. `better`: 1 where more is, -1 where less is, 0 where neither is."""

    name: str
    shown: str
    detail: str
    value: float
    better: int
    tone: str = ""


# ---- at once


def step_measures(p: JobResult, asked: Asked | None) -> list[Measure]:
    m = p.memory
    idle = p.breakdown.get("bubble", 0.0)
    fits = f"of {size(m.memory)}, " + (f"{size(m.margin)} to spare" if m.fits else f"{size(-m.margin)} too much")
    out = [
        Measure("Step", seconds(p.seconds), f"{_count(p.job.tokens)} tokens each", p.seconds, -1),
        Measure("Throughput", f"{_count(p.tokens_per_second)}/s", f"{p.tokens_per_second_per_gpu:,.0f} tokens/s a GPU",
                p.tokens_per_second, 1),
        Measure("MFU", percent(p.mfu), f"of {p.peak[0]}'s {p.peak[1] / 1e12:.0f} TFLOPS", p.mfu, 1),
        Measure("Memory", size(m.needed), fits, m.needed, 0, "good" if m.fits else "bad"),
        Measure("Transfers", seconds(p.exposed), f"exposed, {_share(p.exposed, p)}", p.exposed, -1),
        Measure("Pipeline bubble", seconds(idle), _share(idle, p), idle, -1),
    ]  # fmt: skip
    return out if asked is None else [*out, *_spent(p, asked)]


def _share(took: float, p: JobResult) -> str:
    return f"{percent(took / p.seconds)} of the step"


def _spent(p: JobResult, asked: Asked) -> list[Measure]:
    """Were there no noise and no failures."""
    s = p.spent(asked.tokens)
    return [
        Measure("Steps alone", _days(s.days), f"{s.steps:,.0f} steps, nothing ever stops", s.days, -1),
        Measure("GPU hours", amount(s.gpu_hours), f"{s.kwh / 1e3:,.0f} MWh", s.gpu_hours, -1),
    ]


def step_sentence(p: JobResult) -> str:
    job, m = p.job, p.memory
    fits = f"it fits with {size(m.margin)} to spare" if m.fits else f"it does not fit: {size(-m.margin)} too much"
    where = f"{job.gpus:,} x {job.platform.gpu.name}" if job.gpus > 1 else f"one {job.platform.gpu.name}"
    return f"A step takes {seconds(p.seconds)} on {where}; {_loss(p)}; {fits}."


def _loss(p: JobResult) -> str:
    name, took = p.loss
    bound = {"compute": "compute sets the pace", "memory bandwidth": "memory bandwidth sets the pace",
             "communication": "transfers set the pace", "pipeline": "the pipeline's bubble takes most",
             "host": "the host sets the pace"}[p.bound]  # fmt: skip
    lost = f", {percent(took / p.seconds, 0)} goes to {PARTS.get(name, name)}" if took > 0.005 * p.seconds else ""
    return bound + lost


# ---- with draws


@lru_cache(64)
def step_drawn(text: str, noise: str) -> Guarantee:
    """As `presage job --draws 4000` draws it; without the interval for what is not known of the noise."""
    from presage.prediction.draws.distribution import belief_of
    from presage.prediction.draws.guarantee import guarantee
    from presage.prediction.draws.step_model import step_model

    p = predicted(text)
    _drawable(p)
    belief, _ = belief_of(p.job, p.seconds, noise)
    return guarantee(step_model(p.job, p.job_step), belief, SEED, draws_of(p), sets=0)


def draws_of(p: JobResult) -> int:
    """Fewer where a step has many stages: they take as long as the square of these."""
    return max(FEWEST, min(DRAWS, int(DRAWS * (STAGES / p.job.parallel.pp) ** 2)))


def _drawable(p: JobResult) -> None:
    if p.job.parallel.pp > MOST:
        raise Wrong(
            f"pp is {p.job.parallel.pp}: this page draws steps of {MOST} stages at most; presage job --draws can"
        )


def sure_measures(p: JobResult, g: Guarantee) -> list[Measure]:
    late, middle = g.quantile(0.95).value, g.quantile(0.5).value
    over, more = g.exceeds(1.1 * middle).value, percent(late / p.seconds - 1)
    return [
        Measure("19 steps of 20", seconds(late), f"at most, {more} over the quiet step", late, -1),
        Measure("P(> 1.1 x median)", percent(over, 2), f"a step longer than {seconds(1.1 * middle)}", over, -1),
    ]  # fmt: skip


@lru_cache(64)
def run_drawn(text: str, asked: Asked) -> RunResult:
    """As `presage run --draws 500` draws it."""
    from presage.runs.drawn import step_times
    from presage.runs.sets import DEFAULT, reliability
    from presage.runs.whole import predict_run

    p = predicted(text)
    _drawable(p)
    steps = asked.steps(p.job.tokens)
    if (years := steps * p.seconds / YEAR) > LONG:
        raise Wrong(f"the run would take {years:,.0f} years: ask for fewer tokens, or take more GPUs", ("tokens",))
    kind = reliability(DEFAULT)
    times, _ = step_times(p, asked.noise, bool(kind.slow), SEED)
    until = None if asked.days is None else asked.days * DAY
    found = predict_run(p, steps, kind, times=times, draws=RUNS, seed=SEED, deadline=until)
    assert found.outcome.draws == RUNS  # drawn here, so that whoever waits for it waits outside the cache's lock
    return found


def run_measures(r: RunResult) -> list[Measure]:
    o = r.outcome
    middle, late = o.quantile(0.5) / DAY, o.quantile(0.95) / DAY
    good = float(o.goodput.mean())
    out = [
        Measure("Whole run", _days(middle), f"19 of 20: {_days(late)} at most", middle, -1),
        Measure("Goodput", percent(good), f"of the time; {float(o.failures.mean()):,.0f} failures", good, 1),
    ]
    if r.deadline is not None:
        chance = o.done_by(r.deadline)
        tone = "good" if chance >= 0.9 else "bad" if chance < 0.5 else "warn"
        said = f"done within {r.deadline / DAY:g} days"
        out.append(Measure("By the deadline", percent(chance), said, chance, 1, tone))
    if r.cost is not None:
        cost = float(_median(r.cost))
        out.append(Measure("Cost", _count(cost), f"at {r.job.terms.price:g} a GPU hour", cost, -1))
    return out


def _median(values: Any) -> float:
    from presage.runs.outcome import quantiles

    return float(quantiles(values, 0.5))


def run_sentence(r: RunResult, asked: Asked) -> str:
    """The run in a sentence, and where its time goes beside steps."""
    o = r.outcome
    whole = float(sum(v.mean() for v in o.parts.values()))
    lost = sorted(((float(v.mean()) / whole, name) for name, v in o.parts.items() if name != "steps"), reverse=True)
    told = ", ".join(f"{LOST[name]} {percent(share)}" for share, name in lost[:3] if share > 0.001)
    rest = f"; beside its steps go: {told}" if told else ""
    middle, late = _days(o.quantile(0.5) / DAY), _days(o.quantile(0.95) / DAY)
    return f"{_count(asked.tokens)} tokens take {middle}, in 19 of 20 runs {late} at most{rest}."


LOST: Mapping[str, str] = {
    "stalls": "stalls", "slow": "slow episodes", "checkpoints": "checkpoints", "lost": "work done twice",
    "detection": "noticing failures", "spares": "waiting for spares", "restart": "restarts",
}  # fmt: skip


# ---- words


def _days(days: float) -> str:
    if not days < float("inf"):
        return "never done"
    if days >= 1:
        return f"{days:,.0f} days" if days >= 1000 else f"{days:.3g} days"
    return f"{days * 24:.3g} h" if days * 24 >= 1 else f"{days * 1440:.3g} min"


def _count(value: float) -> str:
    return amount(value).replace("G", "B")
