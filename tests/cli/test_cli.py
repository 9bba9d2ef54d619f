"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import shell as run
from synthetic import Tracer

PRESAGE = str(Path(sys.executable).with_name("presage"))


def process(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PRESAGE, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [[], ["trace"], ["replay"], ["accuracy"]])
def test_help_teaches(command: list[str]) -> None:
    found = run(*command, "--help")
    assert found.returncode == 0
    assert "presage" in found.stdout


def test_the_demo_needs_nothing() -> None:
    found = json.loads(process("trace", "demo", "--json", "-").stdout)
    (rank,) = found["ranks"]
    assert len(rank["steps_s"]) == 2
    assert rank["activity_s"]["idle"]["host"] > 0
    assert found["critical_path"]


def test_replay_json() -> None:
    found = json.loads(run("replay", "demo", "--scale", "kernel=.*:0.5", "--json", "-").stdout)
    (rank,) = found["ranks"]
    assert max(abs(e) for e in rank["error"]) < 0.005
    assert sum(rank["edited_s"]) < sum(rank["replayed_s"])


def test_the_timeline_for_perfetto(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert run("replay", "demo", "--trace", out).returncode == 0
    events = json.loads(out.read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"rank 0 measured", "rank 0 predicted"}
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_accuracy_of_one_file(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 100)
    t.op("aten::add", 0, 90)
    t.launch("add", 40, 50, 5)
    t.write(tmp_path / "t.json")
    found = run("accuracy", "traces", tmp_path, "--json", tmp_path / "a.json", "--out", tmp_path / "rows.csv")
    assert found.returncode == 0, found.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["metrics"]["replay"]["n"] == 1
    assert result["metrics"]["replay"]["max"] < 0.01
    assert (tmp_path / "rows.csv").read_text().startswith("metric,group,name,predicted,measured,error\n")


def test_accuracy_goes_on_past_unknown_categories(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 100)
    t.op("aten::add", 0, 90)
    t.launch("add", 40, 50, 5)
    t.add("banana", "b", 1, 1)
    t.write(tmp_path / "t.json")
    result = json.loads(run("accuracy", "traces", tmp_path, "--json", "-").stdout)
    assert result["metrics"]["replay"]["n"] == 1
    assert "categories not known" in result["skipped"][0]["reason"]


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files a user may give by mistake, and a word the answer must contain."""
    no_gpu, unknown, negative, good = Tracer(), Tracer(), Tracer(), Tracer()
    no_gpu.op("aten::add", 0, 5)
    unknown.launch("k", 0, 5, 5)
    unknown.add("banana", "b", 1, 1)
    negative.launch("k", 0, 5, -5)
    good.launch("k", 0, 5, 5)
    truncated = good.write(folder / "truncated.json.gz")
    truncated.write_bytes(truncated.read_bytes()[:-9])
    (folder / "empty.json").write_bytes(b"")
    (folder / "text.json").write_text("hello")
    nodes = [{"id": 1, "name": "a", "ctrl_deps": 2}, {"id": 2, "name": "b", "ctrl_deps": 1}]
    (folder / "cyclic.json").write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": nodes}))
    return {
        "truncated gzip": (truncated, "gzip"),
        "not JSON": (folder / "text.json", "not JSON"),
        "no GPU events": (no_gpu.write(folder / "cpu.json"), "no GPU events"),
        "cyclic graph": (folder / "cyclic.json", "nodes"),
        "negative duration": (negative.write(folder / "negative.json"), "dur"),
        "unknown category": (unknown.write(folder / "unknown.json"), "banana"),
        "0 bytes": (folder / "empty.json", "empty"),
        "missing file": (folder / "nowhere.json", "no such file"),
    }


def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    for what, (path, word) in bad_files(tmp_path).items():
        out = tmp_path / "out.json"
        found = run("trace", path, "--json", out)
        assert found.returncode == 2, what
        assert word in found.stderr, (what, found.stderr)
        assert str(path) in found.stderr, what
        assert found.stderr.count("\n") == 1, what
        assert found.stdout == "", what
        assert not out.exists(), what
    alone = process("trace", path, "--json", out)
    assert (alone.returncode, alone.stdout, alone.stderr) == (found.returncode, found.stdout, found.stderr)


def test_a_missing_rank_is_exit_2(tmp_path: Path) -> None:
    for rank in (0, 2):
        t = Tracer(rank, 3)
        t.launch("k", 0, 5, 5)
        t.write(tmp_path / f"{rank}.json")
    found = run("replay", tmp_path, "--trace", tmp_path / "out.json")
    assert found.returncode == 2
    assert "rank 1 of 3 missing" in found.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["replay", "demo", "--scale", "gemm"], "TARGET=REGEX:FACTOR"),
        (["replay", "demo", "--drop-rank-delay", "3"], "ranks 0"),
        (["replay", "demo", "--remove", "kernel=nothing_like_it"], "no kernel matches"),
        (["trace", "demo", "--rank", "7"], "ranks 0"),
        (["trace", "demo", "--json", "no/such/folder/x.json"], "cannot be written"),
        (["accuracy", "banana", "x"], "unknown accuracy kind"),
        (["accuracy", "traces", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_say_what_to_do(args: list[str], word: str) -> None:
    found = run(*args)
    assert found.returncode == 2
    assert word in found.stderr
    assert "Traceback" not in found.stderr


def test_importing_is_fast_and_light() -> None:
    """The base import loads none of the heavy parts; the claim of half a second has room on a slow machine."""
    code = "import sys, presage; print([m for m in ('numba', 'numpy', 'torch', 'rich', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_everything_public_is_there() -> None:
    import presage

    for name in presage.__all__:
        assert getattr(presage, name) is not None
    assert dir(presage) == presage.__all__
    with pytest.raises(AttributeError):
        presage.nothing_like_it  # noqa: B018


def test_a_script_that_needs_torchrun_runs_as_its_only_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(8, 8).cuda(int(os.environ['LOCAL_RANK']))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n"
        "    model(torch.ones(2, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert run("predict", "--ranks", "1", "train.py").returncode == 0
    assert "--ranks N" in run("predict", "train.py").stderr
