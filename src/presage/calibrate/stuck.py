"""Draws that never came back: a kernel may take minutes for a shape nobody uses, and the sweep is killed in it.

The draw under way is written down. What a killed sweep was at is tried once more when it goes on, for there are other
reasons to be killed; a draw that ends a sweep a second time is left out from then on.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from presage.files import write_whole


class Stuck:
    """The draws of one family that ended sweeps, each as often as it did, in FAMILY.stuck beside its rows."""

    def __init__(self, folder: Path, family: str) -> None:
        self.under_way, self.file = folder / f"{family}.now", folder / f"{family}.stuck"
        ended: list[int] = json.loads(self.file.read_text()) if self.file.exists() else []
        if self.under_way.exists():
            draw = self.under_way.read_text()
            if draw.isdigit():  # it is empty where the kill came between its making and its writing
                ended.append(int(draw))
                write_whole(self.file, json.dumps(sorted(ended)).encode())
            self.under_way.unlink()
        self.draws = {draw for draw, times in Counter(ended).items() if times > 1}

    def at(self, draw: int) -> None:
        self.under_way.write_text(str(draw))

    def done(self) -> None:
        self.under_way.unlink(missing_ok=True)
