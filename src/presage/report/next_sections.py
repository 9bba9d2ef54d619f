"""What to do next: the changes that would gain most, with their cost in memory, and how to try them."""

from __future__ import annotations

from shlex import quote

from presage.errors import PresageError
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.rank_set import RankBasis, RankSet, other_strategies
from presage.prediction.step import StepResult
from presage.report.answer import Section, data_table
from presage.report.terms import signed
from presage.text import seconds, size

TITLE = "What to do next"


def next_edits_section(p: StepResult) -> Section | None:
    """The edits that would make a step of one GPU faster; None where none can be tried. Of ranks: other strategies."""
    from presage.whatif.suggest import next_edits

    if isinstance(p.basis, RankBasis):
        return _next_strategies_section(p, p.basis.team)
    try:
        found = next_edits(p)
    except PresageError:  # the GPU is a calibration pack of the user's
        return None
    command = f"presage whatif {quote(p.source or 'STEP')} --gpu {p.basis.gpu.key}"
    if not found:
        text = f"None of the usual edits makes this step faster or smaller. To try all: {command} --suggest"
        return Section(TITLE, (), None, text, where="page")
    rows = [
        (", ".join(w.edits), f"{w.per_work.p50:.2f}x", seconds(w.edited.step.p50), _memory(w.memory_change))
        for w in found
    ]
    table = data_table("Edits", ("edit", "speed-up", "step", "memory"), rows)
    text = f"The edits that gain most. Try one with: {command} --apply EDIT; all, and together: --suggest"
    return Section(TITLE, (table,), None, text, where="page")


def _next_strategies_section(p: StepResult, team: RankSet) -> Section:
    """The strategies that would make the ranks faster, or fit."""
    found = other_strategies(p)
    one = f"edits of one rank's step: presage whatif {quote(p.source or 'STEP')} --gpu {p.basis.gpu.key} --suggest"
    if not found:
        text = f"No other strategy is faster and fits. To try {one}"
        return Section(TITLE, (), None, text, where="page")
    rows = [
        (way.name, f"{gain:.2f}x", seconds(r.step.p50), _memory(r.memory_bytes - p.memory_bytes))
        for way, gain, r in found
    ]
    table = data_table("Strategies", ("strategy", "speed-up", "step", "memory per GPU"), rows)
    ranks = f"--ranks {team.layout.ranks} --platform {team.platform.key} --strategy NAME"
    text = f"The strategies that gain most. Try one with: presage predict {quote(p.source or 'STEP')} {ranks}; {one}"
    return Section(TITLE, (table,), None, text, where="page")


def next_plans_section(p: JobResult) -> Section:
    """Plans near the job's that would be faster."""
    from presage.search import better_neighbours, compare_plans
    from presage.search.job_toml import changed_keys

    found = better_neighbours(p)
    if not found:
        text = "No plan that differs in one knob fits and is faster. To search all plans: presage plan JOB.toml"
        return Section(TITLE, (), None, text, where="page")
    rows = []
    for other in found:
        changes = ", ".join(f"{name} {here} -> {there}" for name, here, there in compare_plans(p, other).knobs)
        options = " ".join(f"--set {key}={quote(value)}" for key, value in changed_keys(p.job, other.job))
        gain = signed(other.seconds / p.seconds - 1)
        rows.append((changes, gain, _memory(other.memory.needed - p.memory.needed), options))
    table = data_table("Plans", ("change", "step time", "memory per GPU", "try it"), rows, text=(0, 3))
    text = (
        "The plans next to this one that gain most. Try one by adding its options to the command below; all plans: "
        "presage plan JOB.toml"
    )
    return Section(TITLE, (table,), None, text, where="page")


def _memory(change: float) -> str:
    return f"{'+' if change > 0 else '-'}{size(abs(change))}" if abs(change) >= 1024**2 else "unchanged"
