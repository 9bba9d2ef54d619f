"""`presage study`: as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import runner
from presage.cli.study import app
from presage.errors import PresageError

pytestmark = pytest.mark.usefixtures("few_draws")

JOB = Path(__file__).resolve().parents[2] / "examples" / "jobs" / "hugging_face.toml"
run = runner(app)


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    path = tmp_path / "noise.toml"
    path.write_text("[spread.products]\nrank = 0.02\n[common]\nsd = 0.003\n")
    return path


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("scale", ["--gpus", "128,1024"], ["useful", "goodput", "1,024"]),
        ("compute", ["--times", "1,2", "--memory"], ["x as fast", "bound", "x2"]),
        ("domain", ["--domains", "8,72"], ["NVL72", "plan"]),
        ("power", ["--caps", "1,0.7", "--no-placing"], ["clock", "spread 4%"]),
    ],
)
def test_each_study_prints_draws_and_writes(
    kind: str, more: list[str], words: list[str], noise: Path, tmp_path: Path
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "plot.svg"
    told = run(kind, JOB, *more, "--noise", noise, "--draws", "200", "--json", out, "--plot", picture)
    for word in ("p95/p50", "no noise", "noise costs", *words):
        assert word in told
    value = json.loads(out.read_text())
    assert value["study"] == kind and len(value["points"]) >= 2 and value["noise"] == str(noise)
    assert all(p["p95_ms"]["value"] >= p["p50_ms"]["value"] > 0 for p in value["points"])
    assert picture.stat().st_size > 5_000


def test_json_alone_goes_to_stdout(noise: Path) -> None:
    told = run("compute", JOB, "--times", "1", "--noise", noise, "--draws", "100", "--json", "-")
    assert json.loads(told)["points"][0]["name"] == "x1"


def test_mistakes_get_a_sentence(noise: Path) -> None:
    for kind, option, value in (
        ("scale", "--gpus", "many"),
        ("compute", "--times", "-1"),
        ("domain", "--domains", "8.5"),
    ):
        with pytest.raises(PresageError, match=f"{option} {value}: should be numbers such as"):
            run(kind, JOB, option, value, "--noise", noise)


def test_a_study_of_nothing_fails(noise: Path) -> None:
    found = CliRunner().invoke(app, ["scale", str(JOB), "--gpus", "100", "--noise", str(noise)])
    assert found.exit_code == 1 and "skipped 100" in found.stdout
