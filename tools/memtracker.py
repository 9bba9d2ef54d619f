"""torch's own MemTracker on the steps of a workloads file, beside the measured peaks: a yardstick.

python tools/memtracker.py WORKLOADS.py MEASURED.json
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from presage.capture import load_cases
from presage_validation.score import Row, score
from presage_validation.workloads import measured_cases


@contextmanager
def noticed(kind, found: list):
    """Objects of a class are put on a list as they are made."""
    made = kind.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        found.append(self)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = made


def peak(build) -> int:
    """Bytes at the peak of the second step, as MemTracker sees it on fake CPU tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        modules: list[torch.nn.Module] = []
        optimizers: list[torch.optim.Optimizer] = []
        with noticed(torch.nn.Module, modules), noticed(torch.optim.Optimizer, optimizers):
            step = build("cpu")
        inner = {id(c) for m in modules for c in m.children()}
        tops = [m for m in modules if id(m) not in inner and any(True for _ in m.parameters())]
        tracker = MemTracker()
        tracker.track_external(*tops, *optimizers)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        return max(v["Total"] for v in tracker.get_tracker_snapshot("peak").values())


def main() -> None:
    workloads, measured = map(Path, sys.argv[1:3])
    rows, functions = [], load_cases(workloads)
    for name, runs in measured_cases(measured).items():
        truth = sorted(r["peak_alloc"] for r in runs)[len(runs) // 2]
        try:
            rows.append(Row("MemTracker", name, "peak", peak(functions[name]), truth))
            print(f"{name:32} {rows[-1].error:+.1%}", flush=True)
        except Exception as e:  # it does not run on every model: that is part of the answer
            print(f"{name:32} fails: {type(e).__name__}: {str(e).splitlines()[0][:80] if str(e) else ''}", flush=True)
    s = score(rows)
    print(f"MemTracker runs on {s.n} cases: MAPE {s.mape:.1%}, max {s.max:.1%}")


if __name__ == "__main__":
    main()
