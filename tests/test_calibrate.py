"""The calibration sweeps: the same draws every time, and calls that work, tried here without a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from presage.calibrate.measure import leaf_rows
from presage.calibrate.sweeps import FAMILIES, draw

PACK = Path(__file__).resolve().parent.parent / "data" / "h200_pack" / "seed0"


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_repeatable_and_are_what_was_measured(name: str) -> None:
    draws = draw(name)
    assert draws == draw(name)
    assert draws[:5] != draw(name, seed=1)[:5]
    with gzip.open(PACK / f"{name}.jsonl.gz", "rt") as f:
        measured = [json.loads(line)["p"] for line in f]
    assert json.loads(json.dumps(draws)) == measured


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_run(name: str) -> None:
    """Under capture the calls see a GPU and launch what they should."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")
    from presage.capture import capture

    for parameters in draw(name)[:3]:
        graph = capture(lambda device, p=parameters: FAMILIES[name].build(torch, p))  # noqa: ARG005
        assert any(op.kernels for op in graph.ops), parameters


def test_measured_draws_have_their_ops() -> None:
    for path in sorted(PACK.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as f:
            rows = [json.loads(line) for line in f]
        times = [op["us"] for row in rows for op in row.get("ops", [])]
        # a few draws need no kernel (a permutation that changes nothing); none failed
        assert sum(bool(row.get("ops")) for row in rows) >= 0.9 * len(rows), path.name
        assert not any("error" in row for row in rows), path.name
        assert min(times) > 0, path.name


def test_leaf_ops_get_their_kernels() -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [event("user_annotation", f"#a#{k}", 100 * k, 50) for k in range(3)]
    for k in range(3):
        events.append(event("cpu_op", "aten::linear", 100 * k + 1, 30, **{"External id": 10 * k + 1}))
        events.append(
            event("cpu_op", "aten::mm", 100 * k + 5, 20, **{"External id": 10 * k + 2, "Input Dims": [[2, 3]]})
        )
        events.append(event("kernel", "gemm", 500 + 10 * k, 4 + k, **{"External id": 10 * k + 2}))
        events.append(event("kernel", "reduce", 505 + 10 * k, 1, **{"External id": 10 * k + 2}))
    (row,) = leaf_rows(events, ["a"])["a"]
    assert (row["op"], row["us"], row["spread_us"], row["n"]) == ("aten::mm", 6, 2, 3)
    assert [name for name, _ in row["kernels"]] == ["gemm", "reduce"]
