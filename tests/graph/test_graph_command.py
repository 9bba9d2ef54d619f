"""`presage graph` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands import runner
from graph_sketches import training_step
from presage.cli import graph as graph_command
from presage.errors import PresageError
from presage.graph import save
from presage.text import amount, size
from presage.usercode import parse_arguments

run = runner(graph_command.command)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step.presage"
    save.write(training_step(layers=6, rows=1024, width=256), path)
    return path


def test_tables_of_a_saved_graph(saved: Path) -> None:
    text = run(saved)
    for word in ("layers.0-5  (6 alike)", "act  (6 alike)", "(optimizer)", "total", "GEMM", "backward"):
        assert word in text
    assert "2.416 G" in text  # 3 products in each of 6 layers: 18 * 2 * 1024 * 256 * 256


def test_json(saved: Path) -> None:
    found = json.loads(run(saved, "--json", "-", "--depth", "1"))
    assert found["total"]["flops"] == 18 * 2 * 1024 * 256 * 256
    assert [m["name"] for m in found["modules"]] == [*(f"layers.{i}" for i in range(6)), "(optimizer)"]
    assert {p["name"] for p in found["phases"]} == {"forward", "backward", "optimizer"}
    assert "diff" not in found


def test_out_and_diff(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.presage"
    save.write(training_step(layers=6, rows=512, width=256), other)
    assert "shape [512 256] -> [1024 256]" in run(saved, "--diff", other)
    found = json.loads(run(saved, "--diff", other, "--json", "-"))["diff"]
    assert (found["added"], found["removed"], found["changed"], found["same"]) == (0, 0, 30, 6)
    run(saved, "--out", tmp_path / "again.presage")
    assert (tmp_path / "again.presage").read_bytes() == saved.read_bytes()


def test_arguments() -> None:
    given = ["a=1", "b=1.5", "c=true", "d=False", "e=bf16", "f=[1, [2, 3]]", "g=none", 'h="7"', "i=1e-3", "j=a=b", "k="]
    assert parse_arguments(given) == {
        "a": 1, "b": 1.5, "c": True, "d": False, "e": "bf16", "f": [1, [2, 3]], "g": None, "h": "7", "i": 1e-3,
        "j": "a=b", "k": "",
    }  # fmt: skip
    for bad, said in (
        ("batch", "should be NAME=VALUE"),
        ("2x=1", "should be NAME=VALUE"),
        ("a=[1", "is not valid JSON"),
    ):
        with pytest.raises(PresageError, match=said):
            parse_arguments([bad])
    with pytest.raises(PresageError, match="a is given twice"):
        parse_arguments(["a=1", "a=2"])


def test_a_saved_graph_takes_no_arguments(saved: Path) -> None:
    with pytest.raises(PresageError, match="takes no arguments"):
        run(saved, "--arg", "batch=2")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match="no such file"):
        run(tmp_path / "none.presage")


def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m == "presage.capture" or m.startswith("presage.capture.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PresageError, match=r"needs torch.*pip install 'presage\[torch\]'"):
        run("train.py:build")


def test_numbers() -> None:
    assert [amount(v) for v in (0, 950, 1234, 45.6e9, 2e15)] == ["-", "950", "1.234 k", "45.6 G", "2 P"]
    assert [size(v) for v in (0, 500, 1536, 3 << 30)] == ["-", "500 B", "1.5 KiB", "3 GiB"]
