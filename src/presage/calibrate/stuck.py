"""Draws that never came back: a kernel may take minutes for a shape nobody uses, and the sweep is killed in it.

The draw under way is written down. What a killed sweep was at is remembered, and left out, when it goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["Stuck"]


class Stuck:
    """The draws of one family that ended a sweep, in FAMILY.stuck beside its rows."""

    def __init__(self, folder: Path, family: str) -> None:
        self.under_way, self.file = folder / f"{family}.now", folder / f"{family}.stuck"
        self.draws: set[int] = set(json.loads(self.file.read_text())) if self.file.exists() else set()
        if self.under_way.exists():
            self.draws.add(int(self.under_way.read_text()))
            self.file.write_text(json.dumps(sorted(self.draws)))
            self.under_way.unlink()

    def at(self, draw: int) -> None:
        self.under_way.write_text(str(draw))

    def done(self) -> None:
        self.under_way.unlink(missing_ok=True)
