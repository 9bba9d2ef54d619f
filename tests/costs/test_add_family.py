"""The walk of docs/add_family.md on a copy of the sources: how many files a new kernel family takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = Path("presage/costs/families")
SWEEP = """

FAMILIES["rotary"] = (lambda rng: {"rows": log_int(rng, 1, 1e5)}, lambda torch, p: one(lambda: None), 10)
"""
PREDICT = """
from presage.graph.graph import Graph, Op, Ref, Storage, Tensor
from presage.prediction.machine import machine
from presage_fit.calibrate.sweeps import draw

tensors = tuple(Tensor(i, i, (8192, 32, 128), (4096, 128, 1), "bfloat16") for i in range(3))
storages = tuple(Storage(t.id, t.nbytes, "activation") for t in tensors)
op = Op("mylib::rotary", "", (Ref(0), Ref(1)), (2,), "forward", "main")
(time,) = machine("h200").kernels.op_times(Graph((op,), tensors, storages, ()))
print(f"{time.seconds * 1e6:.1f} us by {time.source}", len(draw("rotary")))
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()  # a link to the original
    path.write_text(text.replace(old, new, 1))


def test_a_new_family_takes_four_files_at_most(tmp_path: Path) -> None:
    """The module of the docs, its name in the list, its sweep; the fourth is its test."""
    for package in ("presage", "presage_fit"):
        shutil.copytree(ROOT / "src" / package, tmp_path / package, copy_function=os.symlink)
    module = re.search(r'```python title="rotary.py"\n(.*?)```', (ROOT / "docs/add_family.md").read_text(), re.DOTALL)
    assert module is not None
    (tmp_path / FAMILIES / "rotary.py").write_text(module[1])
    edit(tmp_path / FAMILIES / "__init__.py", '"optimizer",', '"optimizer", "rotary",')
    sweeps = tmp_path / "presage_fit/calibrate/sweeps/sparse.py"
    edit(sweeps, sweeps.read_text(), sweeps.read_text() + SWEEP)
    written = [p for p in tmp_path.rglob("*.py") if not p.is_symlink()]
    result = subprocess.run(
        [sys.executable, "-c", PREDICT], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.stdout == "48.9 us by roofline 10\n", result.stderr
    assert len(written) == 3
