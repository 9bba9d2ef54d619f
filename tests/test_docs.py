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
SHOWN: dict[str, list[tuple[str, int | None, str]]] = {}  # by command: page, how many lines of it, and the text
for page in PAGES:
    for line, shown in BLOCK.findall(page.read_text()):
        command, _, most = line.partition(" | head -")
        SHOWN.setdefault(command, []).append((page.name, int(most) if most else None, shown))


@pytest.mark.parametrize("command", SHOWN, ids=list(SHOWN))
def test_the_output_shown_is_the_output(command: str) -> None:
    args = shlex.split(command)
    args[0] = str(Path(sys.executable).with_name("presage"))
    found = tidy(subprocess.run(args, capture_output=True, text=True, cwd=ROOT, check=True).stdout)
    for page, most, shown in SHOWN[command]:
        assert found[:most] == tidy(shown), f"{page} is out of date: run `python docs/refresh.py`"


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) >= 3
