"""The answer of `presage compare`: a watched training loop beside its prediction."""

from __future__ import annotations

from presage.measure.comparison import ADVICE, CAUSES, RunComparison, table_rows
from presage.report.answer import Answer, Fact, Section, data_table, sections_of
from presage.text import percent, seconds, size


def compare_answer(c: RunComparison, name: str) -> Answer:
    """Measured against predicted, the difference by cause, and the ranks."""
    measured = data_table("Step", ("", "measured", "predicted", "error"), table_rows(c))
    return Answer(
        title=name,
        question="Does the run go as predicted?",
        subject=f"{name}: {len(c.measured.steps):,} timed steps",
        headline=f"{c.headline}.",
        facts=_facts(c),
        sections=sections_of(
            Section("Measured and predicted", (measured,)),
            _differences(c) if c.differences else None,
            _ranks(c) if c.ranks else None,
        ),
        notes=(f"next: {ADVICE[c.largest[0]]}",) if c.largest and c.error and abs(c.error) > 0.01 else (),
        to_data=c.to_json,
    )


def _facts(c: RunComparison) -> tuple[Fact, ...]:
    out = [Fact("Step time", seconds(c.measured.step), "measured, median")]
    if c.error is not None:
        tone = "good" if c.within or abs(c.error) < 0.05 else "bad"
        out.append(Fact("Against prediction", percent(c.error), "slower" if c.error > 0 else "faster", tone))  # type: ignore[arg-type]
    if c.measured.peak_memory is not None:
        out.append(Fact("Peak memory", size(c.measured.peak_memory)))
    return tuple(out)


def _differences(c: RunComparison) -> Section:
    total = c.measured.step - (c.predicted_step or 0.0)
    rows = [(CAUSES[cause], _signed(value)) for cause, value in sorted(c.differences.items(), key=lambda d: -abs(d[1]))]
    title = "Difference by cause, per step"
    return Section(title, (data_table(title, ("cause", "difference"), [*rows, ("all", _signed(total))], bold=(-1,)),))


def _ranks(c: RunComparison) -> Section:
    slow = sorted(c.ranks, key=lambda r: -r.own)[:8]
    rows = [
        (str(r.rank), seconds(r.step), seconds(r.wait), "-" if r.gpu_active is None else seconds(r.gpu_active))
        for r in slow
    ]
    return Section("Slowest ranks", (data_table("Slowest ranks", ("rank", "step", "data wait", "GPU active"), rows),))


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{seconds(abs(value))}"
