"""The same seed gives the same bytes: in another process, another folder, with other hashes of texts.

Two processes run the same commands, each in a folder of its own with another PYTHONHASHSEED; what they print and all
files they write, pages too where a command makes them, must be the same to the byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "examples/jobs/own_model.toml")
STEP = f"{ROOT}/examples/gpt.py:build"
FEW = ("--draws", "120")
# What is written is named in the folder the command runs in; a page is asked for wherever there is one.
COMMANDS: dict[str, tuple[str, ...]] = {
    "gpus": ("gpus",),
    "platforms": ("platforms",),
    "hosts": ("hosts",),
    "job": ("job", JOB, *FEW, "--trace", "t.json"),
    "plan": ("plan", JOB, "--gpus", "16", "--limit", "30", "--keep", "cp=1,micro_batch=1", "--out", "best.toml"),
    "run": ("run", JOB, "--tokens", "1B", *FEW),
    "place": ("place", JOB, *FEW, "--randoms", "3", "--evict", "0", "--out", "places.csv"),
    "fit": ("fit", "steps.csv", "--out", "noise.toml"),
    "trace": ("trace", "demo"),
    "replay": ("replay", "demo", "--trace", "t.json.gz", "--scale", "kernel=.*gemm.*:0.5"),
    "indices": ("indices", "bags.npy"),
    "dlrm": ("dlrm", str(ROOT / "examples/dlrm/criteo.toml"), "--plan", "size_lookup_greedy", "--draws", "20"),
    "graph": ("graph", STEP, "--arg", "batch=1", "--arg", "layers=2", "--out", "g.presage"),
    "predict": ("predict", STEP, "--arg", "batch=1", "--arg", "layers=2", "--trace", "t.json", "--draws", "20"),
}
WORKER = """
import hashlib, io, json, sys
from contextlib import redirect_stdout
from pathlib import Path
import numpy as np
from typer.main import get_command
from presage.cli.app import app

def options(path, command):
    while hasattr(command, "commands"):
        command, path = command.commands[path[0]], path[1:]
    return {o for p in command.params for o in p.opts}

Path("steps.csv").write_text("step,seconds\\n" + "".join(f"{i},{1 + (i * i % 17) / 1000}\\n" for i in range(400)))
np.save("bags.npy", np.arange(400).reshape(100, 4) % 17)
out = {}
for name, call in json.loads(sys.argv[1]).items():
    more = ["--report", f"{name}.html"] if "--report" in options(list(call), get_command(app)) else []
    said = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(said):
        app([*call, *more, "--json", "-"], standalone_mode=False)
    said.flush()
    out[name] = hashlib.sha256(said.buffer.getvalue()).hexdigest()
    if more:
        out[f"{name}.html"] = hashlib.sha256(Path(f"{name}.html").read_bytes()).hexdigest()
    for path in sorted(Path().iterdir()):
        if path.suffix != ".html":
            out[f"{name}: {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
print(json.dumps(out), file=sys.stderr)
"""


def digests(folder: Path, names: tuple[str, ...], hashing: int) -> dict[str, str]:
    folder.mkdir(parents=True)
    env = {**os.environ, "PYTHONHASHSEED": str(hashing)}
    asked = json.dumps({n: COMMANDS[n] for n in names})
    done = subprocess.run(
        [sys.executable, "-c", WORKER, asked], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return found


STEPS = ("graph", "predict")  # which need torch


@pytest.mark.parametrize("steps", [False, True], ids=["facts, traces and jobs", "steps"])
def test_the_same_seed_gives_the_same_bytes(steps: bool, tmp_path: Path) -> None:
    if steps:
        pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")
    names = tuple(n for n in COMMANDS if (n in STEPS) == steps)
    one, other = digests(tmp_path / "a" / "b", names, 1), digests(tmp_path / "c", names, 2)
    assert len(one) > len(names)
    differ = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
    assert not differ, differ


@pytest.mark.usefixtures("few_draws")
def test_another_seed_gives_other_bytes() -> None:
    """So that the test above compares what is drawn at all."""
    from presage.prediction.draws.distribution import predict_distribution
    from presage.prediction.jobs.job_prediction import predict_job

    found = predict_job(JOB)
    told = [predict_distribution(found, None, 50, seed).to_json() for seed in (0, 0, 1)]
    assert told[0] == told[1] and told[0] != told[2]


def test_every_command_is_here() -> None:
    """A new command is tried too, or it says here why not."""
    from presage.cli.app import COMMANDS as THERE

    without = {
        "whatif": "the same capture and draws as predict", "ui": "a server", "examples": "a list of files",
        "calibrate": "needs a GPU", "measure": "needs a GPU", "pack": "prints what is in a file",
        "accuracy": "needs the measured data", "diff": "reads two answers", "compare": "reads a file",
        "sensitivity": "the draws of job",
        "study": "the draws of job", "shard": "searches for seconds; see test_a_search_that_ends_by_itself",
    }  # fmt: skip
    assert {name for _, name, _, _ in THERE} == set(COMMANDS) | set(without)


def test_a_search_that_ends_by_itself_finds_the_same() -> None:
    from presage.embeddings import Table
    from presage.embeddings.sharding_plan import ShardingProblem
    from presage.embeddings.sharding_search import search
    from presage.hardware import platform

    tables = tuple(Table(f"t{k}", rows=10_000 * (k + 1), dim=64, pooling=5.0 + k) for k in range(6))
    problem = ShardingProblem(tables, 4096, 4, platform("dgx-h200"))
    one, other = (search(problem, seconds=1e6, rounds=50, kicks=2, seed=3) for _ in range(2))
    assert one.complete and one.plan == other.plan and one.cost.seconds == other.cost.seconds
