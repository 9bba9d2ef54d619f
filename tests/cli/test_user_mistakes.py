"""Mistakes in the user's own files: one sentence that says what to do, exit code 2."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.errors import PresageError
from presage.files import write_whole
from synthetic import Tracer

pytestmark = pytest.mark.usefixtures("few_draws")

CODE = """
import torch

def model(device):
    return torch.nn.Linear(4, 4, device=device)

def good(device, batch=8):
    x = torch.randn(batch, 4, device=device, requires_grad=True)
    return lambda: x.sum().backward()
"""
JOB = """
[model]
preset = "llama3-8b"
[training]
sequence = 8192
[parallel]
gpus = "eight"
[cluster]
platform = "dgx-h100"
"""
MISTAKES = {
    "graph train.py:model": "it returned the model (Linear): return a function that runs one training step",
    "graph train.py:good --arg batch=eight": "randn() received an invalid combination of arguments - got (str, int",
    "whatif train.py:good --apply batch=16,fp9": "unknown edit 'fp9': did you mean fp8?",
    "job job.toml": "job.toml: parallel.gpus: is 'eight': it should be a whole number",
    "graph trian.py:good": "trian.py: cannot be read: there is no such file: did you mean train.py?",
    "job jobs.toml": "jobs.toml: cannot be read: there is no such file: did you mean job.toml?",
    "trace nothere.json": "nothere.json: cannot be read: there is no such file (`presage examples FOLDER`",
    "trace /proc/self/mem": "/proc/self/mem: cannot be read: Input/output error",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_in_a_file_is_one_short_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, command.split())
    assert isinstance(found.exception, PresageError) and found.exception.exit_code == 2
    assert MISTAKES[command] in str(found.exception) and len(str(found.exception)) < 300


def test_events_without_duration_are_explained(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 0)
    t.op("aten::add", 0, 0)
    t.launch("add", 0, 0, 0)
    found = CliRunner().invoke(app, ["trace", str(t.write(tmp_path / "t.json")), "-v"])
    assert found.exit_code == 0 or isinstance(found.exception, PresageError), found.exception


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_a_full_disk_is_no_mistake(number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(PresageError, match="refused") as caught:
        write_whole(tmp_path / "x", b"x")
    assert caught.value.exit_code == code and not list(tmp_path.iterdir())
