"""Measure the peak memory of one rank of each step in workloads/own_ranks.py on this machine's GPU.

python tools/measure_own_ranks.py OUT.json    every step, each in a process of its own

The process group is PyTorch's fake one, of 8 ranks, which sends nothing; DistributedDataParallel does not work with it
and runs as the only rank of an NCCL group, with the same buckets. Collectives take no time so: times are not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS, WARM_UP = 8, 4
ALONE = ("ddp",)  # steps that need a real group


def measure(name: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.path.insert(0, str(ROOT / "workloads"))
    from own_ranks import CASES

    if name in ALONE:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    build, arguments = CASES[name]
    step = build("cuda", **arguments)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {"peak_alloc": torch.cuda.max_memory_allocated(), "ranks": RANKS}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print("RESULT " + json.dumps(measure(sys.argv[2])))
        return
    sys.path.insert(0, str(ROOT / "workloads"))
    import torch
    from own_ranks import CASES

    out = {"machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}, "cases": {}}
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=120)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if found:
            out["cases"][name] = json.loads(found[0].removeprefix("RESULT "))
        print(name, found[0] if found else done.stderr[-600:], flush=True)
        Path(sys.argv[1]).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
