"""Names from files never reach a terminal raw: escape sequences in them are written out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.cli.faults import run_guarded
from presage.cli.options import output_options
from presage.cli.output import print_note
from presage.text import printable
from synthetic import Tracer
from terminals import PRESAGE, on_a_terminal

CLIPBOARD = "\x1b]52;c;cHduZWQ=\x1b\\"  # OSC 52: writes the clipboard
CSI = "\x9b31m"  # C1: what ESC [ is in eight bits
EVIL = f"a{CLIPBOARD}b{CSI}c\x07"


def raw(text: str) -> list[str]:
    return re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def printed(*args: str | Path) -> str:
    found = CliRunner().invoke(app, [str(a) for a in args])
    assert found.exit_code == 0, found.exception
    return found.stdout + found.stderr


def test_control_characters_are_written_out() -> None:
    assert printable(EVIL) == r"a\x1b]52;c;cHduZWQ=\x1b\b\x9b31mc\x07"
    assert printable("plain \u00e9\n\ttext") == "plain \u00e9\n\ttext"
    assert printable("\u202etxt.exe") == r"\u202etxt.exe"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "evil.toml"
    path.write_text(
        f'name = {json.dumps(EVIL)}\n[model]\npreset = "llama3-8b"\n[training]\nsequence = 8192\nglobal_batch = 64\n'
        '[parallel]\ngpus = 64\ntp = 4\nzero = 1\n[cluster]\nplatform = "dgx-h100"\n'
    )
    return path


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("options", [[], ["-q"], ["-v"], ["--json", "-"]])
def test_the_name_of_a_job(job: Path, options: list[str]) -> None:
    found = printed("job", job, *options)
    assert "cHduZWQ=" in found and not raw(found)


def test_names_on_a_terminal_with_colours(job: Path) -> None:
    found = on_a_terminal([PRESAGE, "job", str(job)])[1]
    assert "\x1b[" in found and r"\x1b]52" in found and "\x1b]52" not in found and "\x9b" not in found


def test_kernels_and_ops_of_a_trace(tmp_path: Path) -> None:
    t = Tracer()
    t.step(0, 0, 100)
    t.op(f"aten::{EVIL}", 0, 90)
    t.launch(f"kernel {EVIL}", 40, 50, 5)
    t.write(tmp_path / "t.json")
    found = printed("trace", tmp_path / "t.json", "-v")
    assert r"kernel a\x1b]52" in found and not raw(found)


def test_notes_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file", EVIL)

    with output_options():
        print_note(EVIL)
    assert run_guarded(fail, debug=False) == 2
    found = capsys.readouterr().err
    assert found.count(r"\x1b]52") == 2 and not raw(found)


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    import os

    t = Tracer()
    t.step(0, 0, 100)
    t.op("aten::add", 0, 90)
    t.launch("add", 40, 50, 5)
    t.write(tmp_path / "t.json")
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.json")
    os.rename(tmp_path / "t.json", bad)
    found = CliRunner().invoke(app, ["trace", bad, "--json", "-", "--report", str(tmp_path / "r.html")])
    assert found.exit_code == 0, found.exception
    assert json.loads(found.stdout) and (tmp_path / "r.html").exists()
