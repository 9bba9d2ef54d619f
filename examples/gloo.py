"""Data-parallel training on the CPU, one process a rank, with one rank late if you like. Writes every rank's trace.

    python examples/gloo.py --ranks 2 --slow-rank 1 --delay-ms 200 --out out/gloo
    presage trace out/gloo                          # who is late, and who waits for it
    presage replay out/gloo --drop-rank-delay 1     # and without the delay?

Run it again without `--slow-rank` to see whether the answer was right.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def training(args, late):
    """A function that runs one step: wait for data, forward, backward with its all-reduces, optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(args.batch, args.width)

    def step():
        with record_function("load"):
            time.sleep((args.load_ms + (args.delay_ms if late else 0)) / 1e3)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def work(rank, args, meet):
    """One rank: train under the profiler, write its trace."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=args.ranks)
    step = training(args, late=rank == args.slow_rank)
    plan = schedule(wait=0, warmup=args.warmup, active=args.steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(args.warmup + args.steps):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(Path(args.out) / f"rank_{rank}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the traces")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow-rank", type=int, help="the rank that is late; none if not given")
    parser.add_argument("--delay-ms", type=float, default=200, help="how late it is, every step")
    parser.add_argument("--load-ms", type=float, default=100, help="how long every rank waits for its data")
    for name, value in {"layers": 6, "width": 256, "batch": 256, "steps": 5, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # forked, so that torch is loaded once
        multiprocessing.start_processes(work, (args, f"{folder}/meet"), args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
