"""The answer of `presage diff`: what changed between two answers, by how much, and which parts explain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from presage.report.answer import Answer, DataTable, Section, data_table, limit_rows, sections_of
from presage.text import amount, percent, seconds, size

# Figures that a headline may be about, the first that both answers have: path in the JSON and name.
FIGURES = (
    (("days", "p50"), "run time"),
    (("step_ms", "p50"), "step time"),
    (("step_ms", "mean"), "step time"),
    (("peak_memory_bytes",), "peak memory"),
    (("memory", "peak_bytes"), "peak memory"),
    (("memory", "needed_bytes"), "memory"),
    (("total", "flops"), "FLOPs"),
)
INPUTS = (
    "source", "arguments", "gpu", "gpus", "platform", "parallel", "model", "name", "tokens", "noise", "flags", "torch",
    "gpu_memory_bytes", "tokens_per_step",
)  # fmt: skip
PARTS = (
    "breakdown",
    "hours_by_cause",
    "families",
    "activity_s",
    "modules",
)  # which explain a change: the first there is
IGNORED = ("kind", "seed", "draws", "notes", "costliest", "coverage", "stages", "helps", "phases", "changes", "spares")
NAMES = ("name", "op", "stage", "rank", "family", "phase", "module", "change")  # what the rows of a list are known by
LEAST = 1e-4  # relative changes below are rounding
MOST_ROWS = 12
Value = float | str | bool | None


@dataclass(frozen=True)
class Change:
    """One figure of the JSON in both answers; None where one of them lacks it."""

    path: tuple[str, ...]
    before: Value
    after: Value

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_number(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in (self.before, self.after))

    @property
    def difference(self) -> float:
        """After less before; 0 for what is not a number in both."""
        return float(self.after) - float(self.before) if self.is_number else 0.0  # type: ignore[arg-type]

    @property
    def relative(self) -> float:
        return self.difference / abs(float(self.before)) if self.is_number and self.before else 0.0


def flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Every single value of a JSON value with its path; rows of lists go by their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from flatten(inner, (*path, _row_name(inner, i)))
    else:
        yield path, value


def _row_name(row: Any, i: int) -> str:
    known = (row[key] for key in NAMES if isinstance(row, Mapping) and isinstance(row.get(key), str | int))
    return str(next(known, i))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """What differs between two answers' JSON."""
    a, b = dict(flatten(before)), dict(flatten(after))
    every = [Change(path, a.get(path), b.get(path)) for path in {**a, **b} if not set(path[:2]) & set(IGNORED)]
    return tuple(c for c in every if _differs(c))


def _differs(c: Change) -> bool:
    if not c.is_number:
        return c.before != c.after
    scale = max(abs(float(c.before)), abs(float(c.after)))  # type: ignore[arg-type]
    return abs(c.difference) > LEAST * scale


def diff_answer(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> Answer:
    """The difference of two answers of the same kind."""
    every = changes(before, after)
    inputs = [c for c in every if c.path[0] in INPUTS]
    block = next((p for p in PARTS if before.get(p)), "")
    parts = sorted((c for c in every if c.path[0] == block and _is_work(c)), key=lambda c: -abs(c.difference))
    rest = sorted((c for c in every if c not in inputs and c.path[0] not in PARTS), key=lambda c: -abs(c.relative))
    head = _headline(before, after) + _fit(before, after)
    return Answer(
        title=f"{names[0]} and {names[1]}",
        question="What changed?",
        subject=f"from {names[0]} to {names[1]}",
        headline=f"{head}{_reasons(inputs, parts)}." if every else "No figure differs.",
        sections=sections_of(
            _section("What was asked", inputs),
            _section("What explains it", parts),
            _section("Other figures", rest),
        ),
        to_data=lambda: {
            "kind": "diff",
            "before": names[0],
            "after": names[1],
            "headline": head,
            "changes": [
                {"name": c.name, "before": c.before, "after": c.after, "relative": c.relative if c.is_number else None}
                for c in (*inputs, *parts, *rest)
            ],
        },
    )


def _is_work(c: Change) -> bool:
    """A part's own time or FLOPs: not its share, which changes with all the others."""
    return c.is_number and (c.path[-1] in ("ms", "flops") or len(c.path) == 2 or c.path[0] == "activity_s")


def _fit(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Whether the job fits, where that changed."""
    a, b = (_at(v, ("fits",)) if "fits" in v else _at(v, ("memory", "fits")) for v in (before, after))
    return "" if a == b else "; it fits in memory now" if b else "; it does not fit in memory any more"


def _headline(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    for path, name in FIGURES:
        a, b = _at(before, path), _at(after, path)
        if isinstance(a, int | float) and isinstance(b, int | float) and a:
            change = f"{percent(b / a - 1)} more" if b >= a else f"{percent(1 - b / a)} less"
            same = abs(b / a - 1) <= LEAST
            shown = f"{show(path, a)} -> {show(path, b)}"
            return f"{name} {show(path, a)}, unchanged" if same else f"{name} {shown} ({change})"
    return "the answers differ"


def _reasons(inputs: list[Change], parts: list[Change]) -> str:
    asked = ", ".join(f"{c.path[-1]} {c.before} -> {c.after}" for c in inputs[:3] if c.path[-1] != "source")
    most = ", ".join(f"{_part_name(c)} {_signed(c)}" for c in parts[:2])
    return (f"; changed: {asked}" if asked else "") + (f"; most of it: {most}" if most else "")


def _part_name(c: Change) -> str:
    inner = [p for p in c.path[1:-1] if p] or [c.path[-1]]
    return " ".join(inner)


def _signed(c: Change) -> str:
    return f"{'+' if c.difference > 0 else '-'}{show(c.path, abs(c.difference))}"


def _section(title: str, found: list[Change]) -> Section | None:
    return Section(title, (_table(title, found),)) if found else None


def _table(title: str, found: list[Change]) -> DataTable:
    rows = [
        (
            c.name,
            show(c.path, c.before),
            show(c.path, c.after),
            *((_signed(c), percent(c.relative)) if c.is_number else ()),
        )
        for c in found
    ]
    return data_table(title, ("", "before", "after", "difference", ""), limit_rows(rows, MOST_ROWS))


def show(path: tuple[str, ...], value: Value) -> str:
    """A value in the unit that its key names."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    keys = path[::-1]
    for key in keys:
        if key.endswith("_ms") or key == "ms":
            return seconds(1e-3 * value)
        if key.endswith("_s"):
            return seconds(value)
        if key.endswith("bytes"):
            return size(value)
        if key == "share" or key in ("mfu", "hfu"):
            return percent(value)
    return amount(value) if abs(value) >= 1000 else f"{value:.4g}"


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
