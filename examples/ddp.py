"""Data-parallel training as torchrun starts it: `torchrun --nproc-per-node 8 examples/ddp.py --fsdp`.

presage predict examples/ddp.py --ranks 8              # without a GPU, and without the other ranks
presage graph examples/ddp.py --ranks 8 -- --fsdp      # its process groups and their traffic
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--fsdp", action="store_true", help="shard parameters, gradients and optimizer state")
for name, value in {"layers": 4, "width": 4096, "batch": 8192, "steps": 100}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
blocks = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
model = nn.Sequential(*blocks).cuda().bfloat16()
if args.fsdp:
    for block in model:
        fully_shard(block)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(args.steps):
    x = torch.randn(args.batch, args.width, device="cuda", dtype=torch.bfloat16)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
