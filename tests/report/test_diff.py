"""`presage diff`: what changed between two answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import runner
from presage.cli.compare import diff_command
from presage.errors import PresageError
from presage.report.diff_answer import changes, diff_answer

JOB = Path(__file__).parents[2] / "examples/jobs/llama3.1-405b.toml"
diff = runner(diff_command)


def test_equal_answers_have_no_difference() -> None:
    data = {"kind": "prediction", "step_ms": {"p50": 35.0}, "notes": ["a"]}
    assert changes(data, {**data, "notes": ["b"]}) == ()
    assert diff_answer(data, data, ("a", "b")).headline == "No figure differs."


def test_the_headline_names_the_change_and_its_largest_part() -> None:
    a = {"step_ms": {"p50": 35.0}, "arguments": {"batch": "8"}, "breakdown": {"gemm": {"ms": 20.0, "share": 0.5}}}
    b = {"step_ms": {"p50": 70.0}, "arguments": {"batch": "16"}, "breakdown": {"gemm": {"ms": 50.0, "share": 0.7}}}
    head = diff_answer(a, b, ("a", "b")).headline
    assert head == "step time 35 ms -> 70 ms (100.0% more); changed: batch 8 -> 16; most of it: gemm +30 ms."


def test_rows_of_lists_go_by_their_names() -> None:
    a = {"families": [{"name": "gemm", "flops": 1.0}, {"name": "norm", "flops": 2.0}]}
    b = {"families": [{"name": "norm", "flops": 2.0}, {"name": "gemm", "flops": 3.0}]}
    assert [c.name for c in changes(a, b)] == ["families.gemm.flops"]


def test_two_jobs(tmp_path: Path) -> None:
    other = tmp_path / "tp4.toml"
    other.write_text(JOB.read_text().replace("tp = 8", "tp = 4"))
    found = diff(JOB, other)
    assert "tp 8 -> 4" in found and "it does not fit in memory any more" in found and "bubble +" in found


def test_a_job_that_is_compared_with_an_answer_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"kind": "prediction"}))
    with pytest.raises(PresageError, match="compare two of the same kind"):
        diff(JOB, path)
