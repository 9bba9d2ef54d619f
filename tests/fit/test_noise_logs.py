"""Readers of step-time logs: formats, what cannot be read, one sentence for each bad file."""

import gzip
import json
from pathlib import Path

import pytest

from presage.errors import InputError, PresageError
from presage_fit.series import fit
from presage_fit.step_logs import LogEvent, read_logs


def test_megatron_log(tmp_path: Path) -> None:
    line = (
        " [2024-01-01] iteration {:8d}/  500 | consumed samples: 1 | elapsed time per iteration (ms): {:.1f} | loss 1\n"
    )
    path = tmp_path / "job.log"
    path.write_text("noise\n" + "".join(line.format(10 * k, 2000 + k) for k in range(1, 6)) + line.format(10, 2500))
    first, second = read_logs([path]).logs
    assert list(first.steps) == [10, 20, 30, 40, 50] and first.stride == 10 and not first.single
    assert first.seconds[0] == pytest.approx(2.001) and second.seconds == pytest.approx([2.5])


def test_csv_logs(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("run,step,step_ms,event\na,0,10,\na,1,11,checkpoint\na,2,,\nb,0,12,\n")
    found = read_logs([path])
    a, b = found.logs
    assert a.seconds == pytest.approx([0.010, 0.011]) and b.run == "b" and a.events == (LogEvent("checkpoint", 1),)
    assert found.skipped == (("steps.csv line 4", "no step time above 0"),)
    bare = tmp_path / "bare.csv"
    bare.write_text("1.5\n1.6\n")
    assert read_logs([bare]).logs[0].seconds == pytest.approx([1.5, 1.6])
    other = tmp_path / "other.csv"
    other.write_text("k,lasted\n0,5\n1,6\n")
    assert read_logs([other], "lasted", "us").logs[0].seconds == pytest.approx([5e-6, 6e-6])


def mlperf(**run: object) -> dict[str, object]:
    return {"submitter": "s", "system": "m", "benchmark": "b", "run": "r", **run}


def test_mlperf_runs_of_all_kinds(tmp_path: Path) -> None:
    runs = [
        mlperf(steps=[[0, 1.0], [1, 1.1]], step_stride=1, validation=[{"after_step": 0, "seconds": 3.0}], nodes=2),
        mlperf(steps=[[31, 1.0], [63, 1.1]], step_end_s=[32.0, 70.0], validation=[{"start_s": 33.0}]),
        mlperf(steps=[], blocks=[[10.0, 1.0], [23.0, 1.0]], validation=[{"start_s": 10.0, "seconds": 3.0}]),
        mlperf(run="empty", steps=[], blocks=[]),
        mlperf(run="odd", steps="what"),
        mlperf(run="negative", steps=[[0, -1.0]]),
    ]
    path = tmp_path / "runs.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"runs": runs, "more": 1}).encode()))
    found = read_logs([path])
    single, strided, blocks = found.logs
    assert single.single and single.events == (LogEvent("validation", 0, 3.0),) and single.meta["nodes"] == 2
    assert strided.kind == "means of 32 steps" and strided.events[0].after_step == 31
    assert blocks.kind == "block means" and list(blocks.counts) == [10, 10] and blocks.total == pytest.approx(20)
    assert [name.split("/")[-1] for name, _ in found.skipped] == ["empty", "odd", "negative"]
    with pytest.raises(PresageError, match="cannot be fitted together"):
        fit([single, blocks])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"{not json", "is not valid JSON"),
        ("a.json", b'{"runs": 3}', "needs a list of runs"),
        ("a.json", b'{"runs": []}', "no step times"),
        ("a.json.gz", b"\x1f\x8bbroken", "cut off or damaged"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"a,b\n1,2\n", "no column of step times"),
        ("a.csv", b"seconds\nx\n", "no step time above 0"),
        ("a.log", b"elapsed time per iteration (ms): 3", "has no line with both"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PresageError, match=says) as e:
        read_logs([path])
    assert "\n" not in str(e.value) and "a." in str(e.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_logs([tmp_path / "none.csv"])
