"""Every command shown in the docs is run and its output compared."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n\$ (presage [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = [(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "command", "shown"), SHOWN, ids=[f"{p}: {c}" for p, c, _ in SHOWN])
def test_the_output_shown_is_the_output(page: str, command: str, shown: str) -> None:
    command, _, most = command.partition(" | head -")
    args = shlex.split(command)
    args[0] = str(Path(sys.executable).with_name("presage"))
    found = subprocess.run(args, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    lines = tidy(found)[: int(most) if most else None]
    assert lines == tidy(shown), f"{page} is out of date: run `python docs/refresh.py`"


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) >= 3
