"""Run every `$ presage ...` block of the README and docs again and put its output below it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n\$ (presage [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def again(found: re.Match[str]) -> str:
    command, _, most = found.group(1).partition(" | head -")
    args = shlex.split(command)
    args[0] = str(Path(sys.executable).with_name("presage"))
    text = subprocess.run(args, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines()[: int(most) if most else None])
    return f"```console\n$ {found.group(1)}\n{lines}\n```"


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page.write_text(BLOCK.sub(again, page.read_text()))


if __name__ == "__main__":
    main()
