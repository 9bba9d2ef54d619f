"""Commands run on a terminal that is none: a pseudo-terminal of so many columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

PRESAGE = str(Path(sys.executable).with_name("presage"))
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(command: Sequence[str], columns: int = 80, **variables: str) -> tuple[int, str]:
    """The exit code, and all that was written to the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    settings = kept | {"TERM": "xterm-256color"} | variables
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    found = bytearray()
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        found += data
    os.close(ours)
    return child.wait(), found.decode(errors="replace")


def plain(text: str) -> str:
    """Without colours and movements."""
    return ESCAPE.sub("", text).replace("\r\n", "\n")


def worked(command: Sequence[str], settings: Mapping[str, str] | None = None, times: int = 3) -> tuple[str, float]:
    """What it prints, and the least processor seconds it took: those that others take do not count."""
    took = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found.stdout, min(took)
