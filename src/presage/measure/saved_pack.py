"""A pack of what was profiled: this GPU's kernels, for `presage predict --pack`.

Steps that are profiled anyway are recorded with shapes, and learned from as `presage calibrate --from` does. Where that
is not possible here (a GPU that is not listed, a part of presage that is not installed), the trace is kept.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import check_new_folder
from presage.measure.prediction import can_predict
from presage.usercode import load_plugin

LEARN = "presage_fit.learn:learn_pack"
PARTLY = "presage is only partly installed here"


@dataclass(frozen=True, slots=True)
class SavedPack:
    """What became of a profile: a pack, or where there is none the reason, and the trace."""

    folder: Path
    calls: int = 0
    gpu: str = ""
    problem: str = ""
    trace: Path | None = None  # where there is no pack

    @property
    def line(self) -> str:
        if not self.problem:
            return f"pack saved: {self.calls:,} calls of {self.gpu}; presage predict TRAIN.py --pack {self.folder}"
        if self.trace is None:
            return f"no pack saved: {self.problem}"
        return (
            f"no pack saved: {self.problem}. The trace is kept: presage calibrate --from {self.trace} --out "
            f"{self.folder}"
        )

    def to_json(self) -> dict[str, Any]:
        trace = None if self.trace is None else str(self.trace)
        return {"folder": str(self.folder), "calls": self.calls, "problem": self.problem or None, "trace": trace}


@dataclass(slots=True)
class PackRecorder:
    """Takes a profile recorded with shapes, and makes a pack of it afterwards."""

    folder: Path
    like: str | None = None  # the listed GPU that this one is most like
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_new_folder(self.folder)

    def export(self, prof: Any) -> str:
        """Write what was profiled to a trace file; returns its path."""
        self.trace = Path(tempfile.mkdtemp()) / "profile.json"
        prof.export_chrome_trace(str(self.trace))
        return str(self.trace)

    def save(self) -> SavedPack:
        """Learn from the trace. What goes wrong is reported, never raised: the run that was profiled counts."""
        if self.trace is None:
            return SavedPack(self.folder, problem="no step was profiled on a GPU")
        try:
            return self._learn(self.trace)
        except (PresageError, OSError) as e:
            return SavedPack(self.folder, problem=_without_path(str(e), self.trace), trace=self._keep(self.trace))
        finally:
            shutil.rmtree(self.trace.parent, ignore_errors=True)

    def _learn(self, trace: Path) -> SavedPack:
        if not can_predict():
            raise PresageError(PARTLY)
        learn = load_plugin("presage.fitters", "learn", LEARN, f"saving {self.folder}")
        found = learn([trace], self.folder, like=self.like)
        return SavedPack(self.folder, len(found.correction.calls), found.gpu)

    def _keep(self, trace: Path) -> Path | None:
        kept = self.folder.with_name(f"{self.folder.name}_trace.json")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(trace, kept)
        except OSError:
            return None
        return kept


def _without_path(problem: str, trace: Path) -> str:
    return problem.replace(f"{trace}: ", "the trace ")
