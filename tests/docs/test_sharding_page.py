"""The tables of docs/sharding.md are what the commands give, and figures repeated elsewhere are those."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean

import pytest

from presage_validation.dlrm import score_dlrm
from presage_validation.sharding import score_sharding
from presage_validation.traced_jobs import score_traced_jobs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from make_sharding import JOBS, PAGE, PLANNERS, TRACED, planners, shown, table, traced_table  # noqa: E402


@pytest.mark.slow
def test_the_table_is_that_of_the_command(shared: Path) -> None:
    rows = score_dlrm(shared / "runs" / "public_runs.csv").rows
    assert shown(PAGE.read_text()) == table(rows), "run docs/make_sharding.py"
    pcie = [abs(r.error) for r in rows if r.metric == "step_time_pcie"]
    for page in ("README.md", "docs/accuracy_overview.md"):
        assert f"{mean(pcie):.0%}" in (ROOT / page).read_text()
    low, high = (f(r.measured / r.predicted for r in rows if r.metric == "step_time_pcie") for f in (min, max))
    assert f"{low:.2f} to {high:.2f} times the prediction" in PAGE.read_text()


@pytest.mark.slow
def test_the_table_of_golden_training_is_that_of_the_command(shared: Path) -> None:
    result = score_traced_jobs([shared / "traces" / "torchrec_dlrm_4xv100"])
    lines = traced_table(result.rows).split("\n")[2:]
    assert lines == shown(PAGE.read_text(), TRACED).split("\n")[-len(lines) :], "run docs/make_sharding.py"
    found = result.metrics()
    pairs = [(found["device"].mape, "kernels"), (found["step_delayed"].mape, "steps")]
    readme = (ROOT / "README.md").read_text()
    for error, what in pairs:
        assert f"{what} {error:.1%}" in readme
    overview = (ROOT / "docs/accuracy_overview.md").read_text()
    for name in ("device", "step_delayed"):
        assert f"{found[name].mape:.1%} on average, {found[name].max:.1%} at worst" in overview
    assert f"steps {found['step_delayed'].mape:.1%} off" in (ROOT / "docs/which_sharding.md").read_text()


@pytest.mark.slow
def test_all_of_the_table_of_traced_jobs_is_that_of_the_command(shared: Path) -> None:
    rows = score_traced_jobs([shared / "traces" / job for job in JOBS]).rows
    assert shown(PAGE.read_text(), TRACED) == traced_table(rows), "run docs/make_sharding.py"


def test_figures_of_eight_ranks_are_those_of_the_table() -> None:
    text, errors = shown(PAGE.read_text(), TRACED), {}
    for line in text.split("\n"):
        cells = [c.strip() for c in line.strip("|").split("|")]
        if cells[0] == "`dlrm_8xv100`":
            errors[cells[1]] = cells[5]
    line = next(x for x in (ROOT / "docs/accuracy_overview.md").read_text().split("\n") if "host-bound, kernels" in x)
    assert re.findall(r"[\d.]+%", line) == [
        errors["step"], errors["kernels of a rank"], errors["step, learned from one rank's trace"],
        errors["kernels of a rank, learned from another's trace"],
    ]  # fmt: skip
    assert f"{float(errors['step'].rstrip('%')):.0f}% where the host is the limit" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("what", "row"), [("kernels of a rank", "kernels of a rank of traced"), ("step, with the delay", "steps of traced")]
)
def test_figures_of_golden_training_are_those_of_the_table(what: str, row: str) -> None:
    """Runs have equally many rows, so their mean is that of the rows; the table's own rounding is allowed for."""
    lines = [[c.strip() for c in x.split("|")] for x in shown(PAGE.read_text(), TRACED).split("\n")]
    errors = [(_percent(c[6]), _percent(c[7])) for c in lines if c[2] == what and c[1] != "`dlrm_8xv100`"]
    assert len(errors) == 6
    said = next(x for x in (ROOT / "docs/accuracy_overview.md").read_text().split("\n") if x.startswith(f"| {row}"))
    on_average, at_worst = map(_percent, re.findall(r"[\d.]+%", said))
    assert on_average == pytest.approx(mean(e for e, _ in errors), abs=0.11)
    assert at_worst == pytest.approx(max(e for _, e in errors), abs=0.051)


def _percent(text: str) -> float:
    return float(text.rstrip("%"))


@pytest.mark.slow
def test_picks_beside_torchrecs_planner_are_those_of_the_command(shared: Path) -> None:
    """presage's column; TorchRec's needs torchrec."""
    found = score_sharding(shared / "h200" / "tbe_sharding.json").picks()["presage"]
    text = shown(PAGE.read_text(), PLANNERS)
    for what, value in (("picks the fastest", found.top1), ("within 10%", found.within_10pct)):
        assert next(x for x in text.split("\n") if what in x).split("|")[3].strip() == f"{value:.0%}"
    mean_regret = next(x for x in text.split("\n") if "on average" in x).split("|")[3].strip()
    assert mean_regret == f"{found.mean_regret:.1%}"


@pytest.mark.slow
def test_torchrecs_planner_does_what_the_page_has(shared: Path) -> None:
    pytest.importorskip("torchrec")
    assert planners(shared) == shown(PAGE.read_text(), PLANNERS), "run docs/make_sharding.py"
