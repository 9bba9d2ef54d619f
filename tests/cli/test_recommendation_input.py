"""Wrong files of recommendation jobs: one sentence each, and status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.errors import PresageError

TABLES = [{"name": f"t{i}", "rows": 1_000_000, "dim": 64, "pooling": 4.0, "alpha": 1.0} for i in range(4)]
JOB = """
name = "small"
batch = 4096
ranks = 2
platform = "dgx-h200"
interaction = "dot"
plan = "plan.json"

[dense]
features = 13
bottom = [64]
top = [64, 1]

[embeddings]
tables = "tables.json"
"""


def _said(*args: str) -> str:
    """What a command that fails says, on one line."""
    done = CliRunner().invoke(app, list(args))
    assert isinstance(done.exception, PresageError), done.output
    assert done.exception.exit_code == 2
    said = str(done.exception)
    assert said and "\n" not in said
    return said


def _files(folder: Path, plan: dict[str, Any], tables: list[dict[str, Any]] | None = None) -> str:
    (folder / "tables.json").write_text(json.dumps({"batch": 4096, "tables": tables or TABLES}))
    (folder / "plan.json").write_text(json.dumps({"ranks": 2, "tables": plan}))
    (folder / "job.toml").write_text(JOB)
    return str(folder / "job.toml")


def _on_first(names: list[str]) -> dict[str, Any]:
    return {name: {"sharding": "table_wise", "ranks": [0]} for name in names}


def test_a_plan_that_names_an_unknown_table(tmp_path: Path) -> None:
    said = _said("dlrm", _files(tmp_path, _on_first(["t0", "t1", "t2", "t3x"])))
    assert "names a table that the job does not have: 't3x': did you mean t3" in said


def test_a_rank_with_no_memory_left(tmp_path: Path) -> None:
    large = [{**t, "rows": 400_000_000} for t in TABLES]
    said = _said("dlrm", _files(tmp_path, _on_first(["t0", "t1", "t2", "t3"]), large))
    assert "GiB more than a rank has for tables: rank 0 is the fullest" in said
    said = _said("shard", str(tmp_path / "tables.json"), "--ranks", "2", "--memory", "1")
    assert "and 2 ranks have 2 GiB: give each at least" in said


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"a.lengths": np.full(10, 3)}, "table a: lengths add up to 30, not to 40 indices"),
        ({"a.offsets": np.array([0, 50, 90])}, "offsets fall, or go past the 40 indices that they point into"),
        ({"a.offsets": np.array([0, 30, 20])}, "offsets fall, or go past the 40 indices that they point into"),
    ],
)
def test_index_data_of_the_wrong_length(tmp_path: Path, found: dict[str, Any], told: str) -> None:
    np.savez(tmp_path / "day.npz", **{"a.indices": np.arange(40)}, **found)
    assert told in _said("indices", str(tmp_path / "day.npz"), "--batch", "10")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pooling": "none"}, "tables[0].pooling: sequence embeddings are not modelled"),
        ({"alfa": 1.0}, "tables[0].alfa: is no value of a table: did you mean alpha?"),
    ],
)
def test_tables_with_values_that_are_not_modelled(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    _files(tmp_path, {}, [{**TABLES[0], **changed}])
    assert told in _said("shard", str(tmp_path / "tables.json"), "--ranks", "2")


def test_shard_takes_the_tables_of_a_job(tmp_path: Path) -> None:
    job = _files(tmp_path, {})
    done = CliRunner().invoke(app, ["shard", job, "--ranks", "2", "--seconds", "1"])
    assert done.exit_code == 0, done.output
    assert "4 tables on 2 ranks" in done.output and "batch 4096" in done.output
