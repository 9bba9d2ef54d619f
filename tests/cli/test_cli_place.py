"""`presage place` as a user meets it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from commands import runner
from presage.cli.place import command
from presage.errors import PresageError

pytestmark = pytest.mark.usefixtures("few_draws")

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
JOB = JOBS / "hugging_face.toml"  # 128 GPUs: 4 replicas x 4 stages x 8
QUICK = ("--draws", "300", "--randoms", "4", "--evict", "2")
place = runner(command)


@pytest.fixture(scope="module")
def speeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """132 GPUs in 33 nodes of 4; n5 is slow, and so is a GPU of n9."""
    path = tmp_path_factory.mktemp("speeds") / "gpus.csv"
    rows = [f"g{i},n{i // 4},{1.2 if i // 4 == 5 else 1.1 if i == 37 else 1.0 + i % 3 / 200}" for i in range(132)]
    path.write_text("gpu,node,factor\n" + "\n".join(rows) + "\n")
    return path


def found(*args: str | Path) -> dict[str, Any]:
    value = json.loads(place(*args, "--json", "-"))
    assert isinstance(value, dict)
    return value


def test_the_answer_comes_first(speeds: Path) -> None:
    text = place(JOB, "--speeds", speeds, *QUICK, "--hot", "1.3")
    best, what, *_ = text.splitlines()
    assert " on 128 of 132 GPUs, relative times 0.9" in what
    assert what.endswith("4 replicas x 4 stages x 8 GPUs in lockstep")
    assert best.startswith("Best placement: p95 step ") and "faster than as given" in best
    for title in ("Step by placement", "Stages of the best", "Nodes to evict, as given", "Left out", "Hot node"):
        assert title in text
    assert "gpus.csv: 132 GPUs (column factor: larger is slower), 33 nodes" in text


@pytest.fixture(scope="module")
def answer(speeds: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """JSON, and the rows written."""
    out = tmp_path_factory.mktemp("placement") / "placement.csv"
    value = found(JOB, "--speeds", speeds, *QUICK, "--hot", "1.3", "--out", out)
    return value, list(csv.DictReader(out.open()))


def test_json_has_all_of_it(answer: tuple[dict[str, Any], list[dict[str, str]]]) -> None:
    value, _ = answer
    p95 = {k: value[k]["p95_ms"]["value"] for k in ("given", "best", "worst")}
    assert value["bound_p95_ms"] <= p95["best"] < p95["given"] <= p95["worst"] * 1.001
    assert p95["best"] < value["random"]["p95_ms"] <= value["random"]["unlucky_p95_ms"]
    assert value["spares"] and all(s.startswith("n5-") for s in value["spares"])  # one node, the slow one
    assert value["left_out"][0]["node"] == "n5" and value["left_out"][0]["p95_ms"] > p95["best"] * 1.02
    assert value["evict"]["given"][0]["name"] == "n5" and value["evict"]["given"][0]["gain"] > 0.02
    assert len(value["hot"]["stages"]) == 4 and 0 <= value["hot"]["least"] < value["hot"]["most"] < 0.31
    assert len(value["ranks"]) == 128 and not set(value["ranks"]) & set(value["spares"])


def test_the_placement_is_written_rank_by_rank(answer: tuple[dict[str, Any], list[dict[str, str]]]) -> None:
    value, rows = answer
    assert [r["gpu"] for r in rows if r["rank"]] == value["ranks"]
    assert [r["gpu"] for r in rows if not r["rank"]] == value["spares"]
    slowest: dict[tuple[str, str], float] = {}
    for r in rows[:128]:
        key = r["replica"], r["stage"]
        slowest[key] = max(slowest.get(key, 0.0), float(r["factor"]))
    told = {(str(i), str(j)): f for i, row in enumerate(value["factors"]) for j, f in enumerate(row)}
    assert slowest == pytest.approx(told, rel=1e-5)
    tensor = [{r["node"] for r in rows[i : i + 2]} for i in range(0, 128, 2)]  # tp 2
    assert all(len(nodes) == 1 for nodes in tensor)


@pytest.mark.slow
def test_a_fleet_can_be_drawn_and_a_seed_fixes_all() -> None:
    drawn = ("--speeds", "random:0.02:0.01:1.2", "--spares", "2", "--hot", "1.2@node3", "--evict", "1")
    one, same = (place(JOB, *drawn, *QUICK, "--json", "-", "--seed", "1") for _ in range(2))
    assert one == same
    assert json.loads(one)["fleet"] == 130


def test_a_file_of_noise_is_used(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    path.write_text("[common]\nsd = 0.05\n")
    calm, wild = (found(JOB, *QUICK, *more) for more in ((), ("--noise", str(path))))
    assert wild["noise"] == str(path)
    width = [v["best"]["p95_ms"]["value"] / v["best"]["p50_ms"]["value"] for v in (calm, wild)]
    assert width[1] > 1.07 > width[0]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--speeds", "random:x"), "should be random:SD or random:SD:SHARE:FACTOR"),
        (("--speeds", "random:0.1:2:1"), "SHARE should lie in"),
        (("--speeds", "none.csv"), "none.csv: cannot be read"),
        (("--hot", "x"), "should be FACTOR or FACTOR@NODE"),
        (("--hot", "1.3@nowhere"), "unknown node nowhere"),
        (("--gpus", "256", "--speeds", "SPEEDS"), "132 speeds, but the job has 256 GPUs"),
        (("--speeds", "SPEEDS", "--column", "factor"), "should be KEY=NAME"),
    ],
)
def test_mistakes_are_said_in_a_sentence(speeds: Path, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(PresageError, match=said):
        place(JOB, *(str(speeds) if a == "SPEEDS" else a for a in args))
