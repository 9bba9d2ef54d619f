"""Operation tables: bad files are named, replays add up, waits are not host time, slowdowns are the published ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from made_up_ops import HEADER, SHAPES, made_up_job
from presage.errors import InputError
from presage_fit import opreplay, opsteps, optable
from presage_validation import straggler_cost as stragglers
from presage_validation.straggler_cost import score_optable, whatif_slowdown

ROW = "0,0,0,1,forward-compute,0.0,1.0,0,0,0,0"


# ---- real files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["ST", "AR"])
def job_file(request: pytest.FixtureRequest, shared: Path) -> Path:
    return shared / "traces" / "bytedance_straggler" / f"trace-{request.param}.csv.gz"


def test_replayed_step_times(job_file: Path) -> None:
    result = score_optable(job_file)
    scores = result.metrics()
    assert scores["replay"].median <= 0.0004 and scores["replay"].max <= 0.001
    assert not result.skipped


def test_waits_come_out_of_the_program_not_of_measured_gaps(job_file: Path) -> None:
    # host time from other steps: a wait hidden in a gap would now be wrong by whatever the waits differ between steps
    assert score_optable(job_file).metrics()["replay_median_host"].median <= 0.001


def test_published_slowdowns(job_file: Path) -> None:
    result = whatif_slowdown(job_file)
    scores = result.metrics()
    assert scores["slowdown"].n == 1 and scores["slowdown"].max <= 1e-5
    for metric in ("step_no_host", "slowdown_by_stage", "slowdown_by_replica", "slowdown_by_op", "ideal_step"):
        assert scores[metric].n and scores[metric].max <= 1e-5, metric
    assert scores["step_without_last_stage"].max <= 1e-5 and scores["step_without_worst_workers"].max <= 1e-5
    assert not result.skipped


def test_shares_of_the_slowdown(shared: Path) -> None:
    folder = shared / "traces" / "bytedance_straggler"
    slow_stage = stragglers.job(optable.read(folder / "trace-ST.csv.gz"))
    assert slow_stage.slowdown() == pytest.approx(1.179, rel=1e-3)
    assert slow_stage.explained(slow_stage.without_last_stage()) == pytest.approx(1.22, abs=0.005)
    slow_worker = stragglers.job(optable.read(folder / "trace-AR.csv.gz"))
    assert slow_worker.slowdown() == pytest.approx(1.973, rel=1e-3)
    assert slow_worker.explained(slow_worker.without_worst_workers()) == pytest.approx(1.0, abs=0.005)


def test_a_mended_worker_is_no_longer_waited_for(shared: Path) -> None:
    """The last stage of AR waits 22 s for the slow replica with no operation to show it: that must not be host time."""
    table = optable.read(shared / "traces" / "bytedance_straggler" / "trace-AR.csv.gz")
    (replay,) = opreplay.replays(table)
    steps = replay.steps
    run = replay.run.copy()
    slow = (steps.dp == 0) & (steps.stage == 0)
    for name in ("forward-compute", "backward-compute"):
        mine = steps.named(name)
        run[slow & mine] = np.median(run[mine & ~slow])
    assert replay.times(run=run).mean() < 0.55 * steps.measured.mean()


# ---- jobs made up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_made_up_jobs_replay_to_their_own_time(tmp_path: Path, shape: dict[str, object]) -> None:
    result = score_optable(made_up_job(tmp_path / "trace-X.csv", **shape))  # type: ignore[arg-type]
    assert result.metrics()["replay"].max < 1e-6
    assert [r.group for r in result.rows[:1]] == ["X"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams_without_host_time_are_the_job_itself(tmp_path: Path, shape: dict[str, object]) -> None:
    # the made-up jobs have no host time, so leaving it out must change nothing (a send to nobody still takes 1 ms)
    table = optable.read(made_up_job(tmp_path / "trace-X.csv", **shape))  # type: ignore[arg-type]
    job = stragglers.job(table)
    measured = {int(i): t for part in job.parts for i, t in zip(part.steps.ids, part.steps.measured, strict=True)}
    assert job.actual() == pytest.approx(measured, rel=5e-5)


def test_no_stragglers_no_slowdown(tmp_path: Path) -> None:
    job = stragglers.job(optable.read(made_up_job(tmp_path / "t.csv", stages=3)))
    assert job.slowdown() == pytest.approx(1.0, abs=1e-9)
    assert list(job.by_stage().values()) == pytest.approx([1.0] * 3, abs=1e-9)


def test_slowdown_by_hand(tmp_path: Path) -> None:
    """Two replicas of one stage: forwards of 1 s and 3 s, one backward of 2 s each. (3 + 2) / (2 + 2)."""
    rows = [HEADER]
    for dp, forward in ((0, 1.0), (1, 3.0)):
        rows.append(f"{dp},0,{dp},0,forward-compute,0.0,{forward},0,0,0,0")
        rows.append(f"{dp},0,{dp},0,backward-compute,{forward},2.0,0,0,0,0")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows))
    job = stragglers.job(optable.read(path))
    assert job.slowdown() == pytest.approx(5 / 4)
    assert job.by_replica() == pytest.approx({0: 1.0, 1: 5 / 4})
    assert job.by_op() == pytest.approx({"forward-compute": 5 / 4, "backward-compute": 1.0})
    assert job.explained(job.without_worst_workers()) == pytest.approx(1.0)


def test_a_collective_is_split_into_wait_and_transfer() -> None:
    start, end = np.array([[0.0], [5.0], [1.0]]), np.array([[6.0], [6.5], [2.0]])
    run, tail = opsteps.transfers(start, end, np.array([0, 0, -1]))
    assert run.ravel().tolist() == [1.0, 1.0, 1.0]
    assert tail.ravel().tolist() == [0.0, 0.5, 0.0]


def test_steps_with_other_operations_make_programs_of_their_own(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "trace-X.csv", steps=4, spread=0.1)
    extra = "0,0,0,3,gc,0.0,0.0,0,-1,-1,-1\n"
    path.write_text(path.read_text() + extra)
    assert [len(s.ids) for s in opsteps.split(optable.read(path))] == [3, 1]
    result = score_optable(path)
    assert result.metrics()["replay"].n == 4 and result.metrics()["replay"].max < 1e-6
    assert result.metrics()["replay_median_host"].n == 3 and len(result.skipped) == 1


def test_an_unknown_operation_is_work_of_its_worker_and_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([HEADER, ROW, "0,0,0,1,teleport,1.0,2.5,0,-1,-1,-1"]))
    result = score_optable(path)
    assert result.rows[0].predicted == pytest.approx(3.5)
    assert any("teleport" in s.row for s in result.skipped)


def test_gzip_and_plain_are_the_same(tmp_path: Path) -> None:
    plain = made_up_job(tmp_path / "trace-X.csv")
    packed = tmp_path / "trace-X.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [r.predicted for r in score_optable(packed).rows] == [r.predicted for r in score_optable(plain).rows]


# ---- files that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("\x00\x01\x02", "not a"),
        ("once upon a time\n", "not a table of operations"),
        (HEADER + "\n", "no rows"),
        (HEADER.replace(",duration", "") + "\n" + ROW, "duration"),
        (f"{HEADER}\n{ROW},7\n", "line 2"),
        (f"{HEADER}\n{ROW}\n0,0,0", "line 3"),
        (f"{HEADER}\n{ROW.replace('1.0', 'soon')}\n", "duration: line 2: 'soon' is not a finite number"),
        (f"{HEADER}\n{ROW.replace('1.0', 'nan')}\n", "finite"),
        (f"{HEADER}\n{ROW.replace('1.0', '-1.0')}\n", "negative duration"),
        (f"{HEADER}\n{ROW.replace('0,0,0,1', '0,0.5,0,1')}\n", "stage: line 2: '0.5' is not a whole number"),
        (f"{HEADER}\n{ROW.replace('0,0,0,1', '-1,0,0,1')}\n", "negative dp_rank"),
        (f"{HEADER}\n{ROW}\n{ROW.replace('0,0,0,1', '2,0,2,1')}\n", "dp_rank"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace-bad.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        optable.read(path)
    assert says in str(error.value) and str(path) in str(error.value)


def test_cut_off_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace-cut.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n{ROW}\n".encode() * 1000)[:-30])
    with pytest.raises(InputError, match="cut off"):
        optable.read(path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="not text"):
        optable.read(path)


def test_missing_rank_is_named(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "t.csv", steps=2)
    kept = [x for x in path.read_text().splitlines() if not x.startswith("1,0,2,1,")]
    path.write_text("\n".join(kept))
    with pytest.raises(InputError, match="step 1 has no rows of dp_rank 1, stage 0"):
        optable.read(path)


def test_missing_message_is_named(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "t.csv", steps=1)
    lines = path.read_text().splitlines()
    lines.remove(next(x for x in lines if ",forward-recv," in x))
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match="4 sends of stage 0 but 3 receives of stage 1"):
        score_optable(path)


def test_repeated_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([HEADER, ROW, ROW]))
    with pytest.raises(InputError, match="line 3"):
        score_optable(path)


def test_no_published_answer_is_said(tmp_path: Path) -> None:
    result = whatif_slowdown(made_up_job(tmp_path / "trace-X.csv", steps=2))
    assert not result.rows and "result-X.json" in result.skipped[0].row


def test_bad_published_answer_is_named(tmp_path: Path) -> None:
    path = made_up_job(tmp_path / "trace-X.csv", steps=2)
    (tmp_path / "result-X.json").write_text('{"blocking_slowdown": "big"}')
    with pytest.raises(InputError, match=r"result-X\.json"):
        whatif_slowdown(path)
