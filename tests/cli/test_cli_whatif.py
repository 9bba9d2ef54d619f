"""`presage whatif`: as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import runner
from graph_sketches import training_step
from presage.cli import graph as graph_command
from presage.cli import replay as replay_command
from presage.cli import whatif as command
from presage.errors import PresageError
from presage.graph import save
from presage.whatif.edits import EDITS

run = runner(command.command)
MODEL = """
import torch
from torch import nn

def build(device, batch=4, width=32):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, width, device=device)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step
"""


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.presage"
    save.write(training_step(12), path)
    return path


def test_the_answer_comes_first_then_the_tables(step: Path, tmp_path: Path) -> None:
    told = run(step, "--apply", "cuda_graph", "--apply", "host=2", "--trace", tmp_path / "out.json").splitlines()
    assert told[1] == "sketch on NVIDIA H200 SXM 141 GB"
    assert told[0].startswith("cuda_graph, host=2: ") and "x as fast (" in told[0] and len(told[0]) < 120
    assert any(line.startswith("note: why: the host is the limit") for line in told)
    text = "\n".join(told)
    for word in ("Before and after", "One by one", "+ cuda_graph", "+ host=2", "peak memory", "confidence high"):
        assert word in text
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"as it is", "with cuda_graph, host=2"}
    drawn = {pid: max(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)}
    assert drawn[1] < drawn[0] / 2, "the edited step is shorter in the picture too"


def test_json_alone_goes_to_stdout(step: Path) -> None:
    found = json.loads(run(step, "--apply", "cuda_graph", "--json", "-", "--draws", "20"))
    assert found["kind"] == "whatif" and found["edits"] == ["cuda_graph"] and found["base"]["draws"] == 20
    assert found == json.loads(run(step, "--apply", "cuda_graph", "--json", "-", "--draws", "20"))


def test_suggestions(step: Path, tmp_path: Path) -> None:
    told = run(step, "--suggest", "--all", "--draws", "10", "--gpus", "b200", "--json", tmp_path / "out.json")
    assert "Best alone: cuda_graph: " in told
    for word in ("Edits, best first", "gpu=b200", "If kernels were twice as fast", "Not applicable", "nothing gained"):
        assert word in told
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["kind"] == "suggestions" and found["suggestions"][0]["edits"] == ["cuda_graph"]
    assert {"edit", "why"} == set(found["not_applicable"][0])
    assert "--all says why" in run(step, "--suggest", "--draws", "10", "--combine", "1")


def test_every_edit_is_listed_with_its_rule() -> None:
    told = run("--list")
    for name in (*EDITS, "gpu=NAME", "host=F|FILE", "batch=N", "FILE.py:FUNCTION", "cuda_graphs for cuda_graph"):
        assert name in told
    found = json.loads(run("--list", "--json", "-"))["edits"]
    assert all(e["rule"].endswith(".") for e in found)
    assert {e["name"] for e in found if e["traces"]} >= {"cuda_graph", "host"}


def test_a_step_is_captured_again_with_another_batch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")
    (tmp_path / "model.py").write_text(MODEL)
    told = run(f"{tmp_path / 'model.py'}:build", "--arg", "width=64", "--apply", "batch=8", "--draws", "10")
    assert "(width=64) on" in told and "time per sample (relative)" in told
    assert "x per sample" in told.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--suggest", "--apply", "cuda_graph"], "give the edits"),
        ([], "give the edits"),
        (["--apply", "cuda_grph"], "did you mean cuda_graph"),
        (["--apply", "batch=8"], "a graph alone cannot be captured again"),
        (["--apply", "no_sync"], "no_sync: nothing to change"),
        (["--apply", "cuda_graph", "--arg", "batch=2"], "is a saved graph, which takes no arguments"),
    ],
)
def test_mistakes_get_a_sentence(step: Path, args: list[str], told: str) -> None:
    with pytest.raises(PresageError, match=told):
        run(step, *args)


def test_replay_takes_edits_by_name() -> None:
    replay = runner(replay_command.command)
    found = json.loads(replay("demo", "--apply", "cuda_graph,faster=gemm:2", "--json", "-"))
    assert found["edits"] == ["cuda_graph,faster=gemm:2"]
    (rank,) = found["ranks"]
    assert sum(rank["edited_s"]) < 0.6 * sum(rank["replayed_s"])
    assert "why: 824.6 us of work" in replay("demo", "--apply", "faster=gemm:2")
    assert "Kernels that match are F times as fast." in replay("--list")


DISTRIBUTED = MODEL.replace("    optimizer =", "    import torch.distributed as dist\n    dist.init_process_group()\n"
    "    model = nn.parallel.DistributedDataParallel(model)\n    optimizer =")  # fmt: skip
graph = runner(graph_command.command)


@pytest.fixture
def distributed(tmp_path: Path) -> str:
    (tmp_path / "spread.py").write_text(DISTRIBUTED)
    return f"{tmp_path / 'spread.py'}:build"


def test_a_graph_of_several_ranks_shows_the_traffic_of_its_groups(distributed: str) -> None:
    told = graph(distributed, "--ranks", "8", "--arg", "width=256")
    row = next(line.split() for line in told.splitlines() if "all_reduce" in line)
    assert row == ["0", "8", "ranks", "world", "0-7", "all_reduce", "1", "258", "KiB", "258", "KiB"]
    found = json.loads(graph(distributed, "--ranks", "8", "--arg", "width=256", "--json", "-"))["traffic"]
    numbers = 256 * 256 + 256 + 256 + 1
    assert [(t["kind"], t["members"], t["calls"], t["bytes"]) for t in found] == [
        ("all_reduce", [*range(8)], 1, 4 * numbers)
    ]


def test_ranks_of_code_that_does_not_communicate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    with pytest.raises(PresageError, match="does not communicate: leave out --ranks"):
        graph(f"{tmp_path / 'own.py'}:build", "--ranks", "8")


@pytest.mark.slow
def test_edits_of_a_rank_keep_its_collectives(distributed: str, tmp_path: Path) -> None:
    wide = "--arg", "width=8192", "--apply", "batch=8", "--draws", "1", "--json", "-"
    alone, one_of_many = (json.loads(run(distributed, "--ranks", n, *wide)) for n in ("1", "8"))
    assert one_of_many["base"]["step_ms"]["p50"] > alone["base"]["step_ms"]["p50"] + 0.2  # 268 MB over NVLink
    said = ["\n".join(found["edited"]["notes"]) for found in (alone, one_of_many)]
    assert "the code communicates, here as the only rank: give --ranks N" in said[0]
    assert "rank 0 alone: its collectives as on NVIDIA DGX H200" in said[1]
    saved = tmp_path / "rank.presage"
    graph(distributed, "--ranks", "8", "--arg", "width=8192", "--out", saved)
    again = json.loads(run(saved, "--apply", "batch=8", "--draws", "1", "--json", "-"))
    assert again["base"]["step_ms"] == one_of_many["base"]["step_ms"]
