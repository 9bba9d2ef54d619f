"""The calibration sweeps: the same draws every time, and calls that work, tried here without a GPU."""

from __future__ import annotations

import gzip
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from presage_fit.calibrate.measure import FLUSH_OP, leaf_rows
from presage_fit.calibrate.resume import StuckDraws
from presage_fit.calibrate.sweeps import FAMILIES, draw

PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack"
SEEDS = {"conv": [(0, 1000), (1, 500), (2, 500), (3, 400), (4, 400)], "attention": [(0, 500), (1, 200)]}
SEEDS |= {
    "conv_net": [*zip(range(11, 18), (4900, 4800, 4900, 4800, 4700, 4600, 4600), strict=True)],
    "various": [(11, 5500), (12, 5800), (13, 5700)],
    "layers": [(11, 7500), (12, 7600), (13, 7700)],
    "recurrent": [(11, 900)],
    "conv_grouped": [(s, {204: 1100, 205: 900}.get(s, 1000)) for s in range(201, 211)],
    "thin": [(301, 700), *((s, 1100) for s in (303, 304, 305, 306, 308, 309, 310))],
    "sides": [(s, 1400 if s in (401, 406) else 1500) for s in range(401, 407)],
    "recurrent_more": [(s, 600) for s in (303, 304, 305, 306, 308, 309, 310)],
    "conv_library": [(s, 2700 if s in (501, 508) else 2600) for s in range(501, 511)],
    "places": [(s, 2200) for s in range(301, 310)],
    "gemm": [(0, 20_000), (9301, 13_300), (9302, 13_100)],
    "conv_ends": [(9401, 3100), (9402, 2900), (9403, 2900)],
    "planes": [(9501, 3000)],
    "large": [(9601, 1200)],
    "conv_volumes": [(s, {602: 3000, 603: 3000, 604: 3000, 609: 3200}.get(s, 3100)) for s in range(600, 610)],
}
ALONE = {  # later, timed one process at a time
    "conv_net": [(728, 1300), (729, 1200)],
    "conv_library": [(s, {702: 1400, 712: 1400}.get(s, 1300 if s in (703, 705, 709, 710, 711, 713, 714) else 1200))
                     for s in range(700, 715)],
    "conv_volumes": [(s, 2000) for s in (720, 721, 722)],
}  # fmt: skip
SEEDS = {name: [*seeds, *ALONE.get(name, [])] for name, seeds in SEEDS.items()}
AGAIN = {"conv": 2700, "copy": 3600, "index": 1800, "optimizer": 700, "pool": 700, "reduce": 3500, "rnn": 175}
AGAIN |= {"sort": 300}  # of another seed, later
CHECKED = 100  # draws of a seed
SLOW = ("unique", "nonzero")  # their results' sizes depend on numbers, which a capture does not have


class Timed(msgspec.Struct):
    us: float
    cold_us: float | None = None


class Measured(msgspec.Struct):
    """A draw and its ops; of what else a row has, nothing is kept."""

    p: dict[str, Any]
    ops: list[Timed] = []
    error: str | None = None


@cache
def measured(name: str) -> list[Measured]:
    rows = msgspec.json.Decoder(Measured)
    with gzip.open(PACK / f"{name}.jsonl.gz") as f:
        return rows.decode_lines(f.read())


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_repeatable_and_are_what_was_measured(name: str) -> None:
    rows = [row.p for row in measured(name) if "design" not in row.p]  # an earlier design drew the others
    assert draw(name, count=5) != draw(name, seed=1, count=5)
    later = AGAIN.get(name, 0)
    for seed, count in [*SEEDS.get(name, [(0, len(rows) - later)]), (31, later)]:
        drawn = json.loads(json.dumps(draw(name, seed, min(count, CHECKED))))
        found, rows = rows[:count][:CHECKED], rows[count:]
        # a builder adds what it saw of random indices
        for p, q in zip(found, drawn, strict=True):
            _same_draw({k: v for k, v in p.items() if k not in ("distinct", "most", "workspace")}, q)
    assert not rows


def _same_draw(measured: Any, drawn: Any) -> None:
    """Large sizes may differ by 1: processors round powers and logarithms differently."""
    if isinstance(measured, dict):
        assert measured.keys() == drawn.keys()
        measured, drawn = list(measured.values()), list(drawn.values())
    if isinstance(measured, list):
        for p, q in zip(measured, drawn, strict=True):
            _same_draw(p, q)
    elif type(measured) is int and measured > 10**6:
        assert abs(measured - drawn) <= 1
    else:
        assert measured == drawn


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_run(name: str) -> None:
    """Under capture the calls see a GPU and launch what they should."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")
    from presage.capture import capture

    some = [p for p in draw(name, count=12) if p.get("what") not in SLOW][:2]
    for parameters in some:

        def step(device: str, p: dict[str, Any] = parameters) -> Any:  # noqa: ARG001
            parts = FAMILIES[name].build(torch, p)
            return lambda: [part() for part in parts]

        assert any(op.kernels for op in capture(step).ops), parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_measured_draws_have_their_ops(name: str) -> None:
    rows = measured(name)
    ops = [op for row in rows for op in row.ops]
    # a few draws need no kernel (a permutation that changes nothing), a few torch refuses
    assert sum(bool(row.ops) for row in rows) >= 0.9 * len(rows)
    assert sum(row.error is not None for row in rows) <= 0.005 * len(rows)
    assert min(op.us for op in ops) > 0
    colder = [op.cold_us / op.us for op in ops if op.cold_us is not None]
    assert 1.0 <= statistics.median(colder) < 1.6


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def window(state: str, k: int, at: float, us: float) -> list[dict[str, object]]:
    """A call of two ops; in the cold state a flush comes before the first."""
    ids = [{"External id": f"{state}{k}{n}"} for n in range(3)]
    flush = [event("cpu_op", FLUSH_OP, at + 1, 1, **ids[0]), event("kernel", "flush", at, 90, **ids[0])]
    return [
        event("user_annotation", f"#a#{state}#{k}", at, 50),
        *(flush if state == "cold" else []),
        event("cpu_op", "aten::mm", at + 5, 20, **ids[1], **{"Input Dims": [[2, 3]]}),
        event("kernel", "gemm", at + 10, us, **ids[1]),
        event("kernel", "reduce", at + 12, 1, **ids[1]),
        event("cpu_op", "aten::add", at + 30, 5, **ids[2]),
        event("kernel", "add", at + 32, 2, **ids[2]),
    ]


def test_leaf_ops_get_their_kernels_warm_and_cold() -> None:
    events = [e for k in range(3) for e in window("warm", k, 100 * k, 4 + k)]
    events += [e for k in range(3) for e in window("cold", k, 1000 + 100 * k, 9)]
    product, added = leaf_rows(events, ["a"])["a"]
    assert (product["op"], product["us"], product["spread_us"], product["n"]) == ("aten::mm", 6, 2, 3)
    assert [name for name, _ in product["kernels"]] == ["gemm", "reduce"]
    assert product["cold_us"] == 10
    assert "cold_us" not in added  # what the op before it wrote is in the cache


def test_a_draw_that_twice_never_came_back_is_left_out(tmp_path: Path) -> None:
    first = StuckDraws(tmp_path, "conv")
    assert not first.draws
    first.at(7)  # and then the process is killed
    second = StuckDraws(tmp_path, "conv")
    assert not second.draws  # it may have been killed for another reason
    second.at(7)
    third = StuckDraws(tmp_path, "conv")
    assert third.draws == {7}
    third.at(8)
    third.done()
    assert StuckDraws(tmp_path, "conv").draws == {7}
