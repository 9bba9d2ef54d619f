"""Training steps as one of several ranks runs them, with PyTorch's own DDP and FSDP2, on a single GPU.

FSDP2 runs as one of eight ranks of PyTorch's fake process group: collectives return at once and move nothing, all else
is as in a real run. DDP, which the fake group cannot serve, runs as the only rank of a real one. So one GPU shows what a
rank computes, copies, allocates and spends on its host. Each builder has its twin without ranks (`gpt`, `resnet`), from
which presage makes the same step by itself.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
from gpt import GPT  # noqa: E402

RANKS = 8


def fake_group():
    """Eight ranks, of which this is one and the others are not there."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def group_of_one(device):
    if not dist.is_initialized():
        backend = "nccl" if str(device).startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _gpt(device, dtype=torch.float32, width=1024, heads=16, layers=12, vocab=50304):
    return GPT(vocab, width, heads, layers).to(device=device, dtype=dtype)


def _step(model, device, batch, sequence, autocast, vocab=50304, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(vocab, (batch, sequence + 1), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def gpt(device, batch=8, sequence=1024, autocast=True, bf16=False, **sizes):
    """The twin: no ranks."""
    return _step(_gpt(device, torch.bfloat16 if bf16 else torch.float32, **sizes), device, batch, sequence, autocast)


def gpt_ddp(device, batch=8, sequence=1024, autocast=True, view=False, **sizes):
    group_of_one(device)
    model = DistributedDataParallel(_gpt(device, **sizes), gradient_as_bucket_view=view)
    return _step(model, device, batch, sequence, autocast)


def gpt_fsdp(device, batch=8, sequence=1024, mixed=True, reshard=True, **sizes):
    """`mixed`: parts and updates in float32, work in bfloat16, gradients sent in float32; else all in bfloat16."""
    fake_group()
    model = _gpt(device, torch.float32 if mixed else torch.bfloat16, **sizes)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return _step(model, device, batch, sequence, False)


def _resnet(device):
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, inside, out, stride):
            super().__init__()
            self.a, self.b = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.na, self.nb = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
            self.short = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 or inside != out else nn.Identity()

        def forward(self, x):
            return F.relu(self.short(x) + self.nb(self.b(F.relu(self.na(self.a(x))))))

    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [nn.Sequential(Block(i, o, s), Block(o, o, 1)) for i, o, s in widths]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks, *head).to(device)


def _images(model, device, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def resnet(device, batch=64):
    return _images(_resnet(device), device, batch)


def resnet_ddp(device, batch=64, view=False):
    group_of_one(device)
    return _images(DistributedDataParallel(_resnet(device), gradient_as_bucket_view=view), device, batch)


class Stack(nn.Module):
    """Blocks of so many small layers each: all host, so that what frameworks cost it shows."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _stacks(device, layers, blocks, width=256):
    return nn.Sequential(*[Stack(width, layers) for _ in range(blocks)]).to(device)


def _stacks_step(model, device, fused=True, width=256):
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x = torch.randn(512, width, device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    return step


def stacks(device, layers=2, blocks=8, fused=True):
    return _stacks_step(_stacks(device, layers, blocks), device, fused)


def stacks_ddp(device, layers=2, blocks=8, view=False, fused=True):
    group_of_one(device)
    model = DistributedDataParallel(_stacks(device, layers, blocks), gradient_as_bucket_view=view)
    return _stacks_step(model, device, fused)


def stacks_fsdp(device, layers=2, blocks=8, fused=True):
    fake_group()
    model = _stacks(device, layers, blocks)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return _stacks_step(model, device, fused)


CASES = {
    "gpt": (gpt, {}),
    "gpt_b1": (gpt, {"batch": 1}),
    "gpt_bf16": (gpt, {"autocast": False, "bf16": True}),
    "gpt_ddp": (gpt_ddp, {}),
    "gpt_ddp_view": (gpt_ddp, {"view": True}),
    "gpt_ddp_b1": (gpt_ddp, {"batch": 1}),
    "gpt_fsdp": (gpt_fsdp, {}),
    "gpt_fsdp_b1": (gpt_fsdp, {"batch": 1}),
    "gpt_fsdp_bf16": (gpt_fsdp, {"mixed": False}),
    "gpt_fsdp_kept": (gpt_fsdp, {"mixed": False, "reshard": False}),
    "resnet": (resnet, {}),
    "resnet_ddp": (resnet_ddp, {}),
    "resnet_ddp_view": (resnet_ddp, {"view": True}),
    **{
        f"{function.__name__}_{layers}": (function, {"layers": layers})
        for function in (stacks, stacks_ddp, stacks_fsdp)
        for layers in (2, 20)
    },
    "stacks_ddp_view_20": (stacks_ddp, {"layers": 20, "view": True}),
    "stacks_fsdp_loop_20": (stacks_fsdp, {"layers": 20, "fused": False}),
}

# Of each step with ranks the twin without, its arguments, and the strategy that makes the one of the other.
_VIEW, _BF16 = {"gradient_as_bucket_view": "true"}, {"autocast": False, "bf16": True}
_MIXED = {"reshard_root": "true", "master_dtype": "float32", "reduce_dtype": "float32"}
TWINS = {
    "gpt_ddp": ("gpt", {}, "ddp", {}),
    "gpt_ddp_view": ("gpt", {}, "ddp", _VIEW),
    "gpt_ddp_b1": ("gpt", {"batch": 1}, "ddp", {}),
    "gpt_fsdp": ("gpt", _BF16, "fsdp", _MIXED),
    "gpt_fsdp_b1": ("gpt", {"batch": 1, **_BF16}, "fsdp", _MIXED),
    "gpt_fsdp_bf16": ("gpt", _BF16, "fsdp", {"reshard_root": "true"}),
    "gpt_fsdp_kept": ("gpt", _BF16, "fsdp", {"reshard_after_forward": "false"}),
    "resnet_ddp": ("resnet", {}, "ddp", {}),
    "resnet_ddp_view": ("resnet", {}, "ddp", _VIEW),
    "stacks_ddp_2": ("stacks", {"layers": 2}, "ddp", {}),
    "stacks_ddp_20": ("stacks", {"layers": 20}, "ddp", {}),
    "stacks_ddp_view_20": ("stacks", {"layers": 20}, "ddp", _VIEW),
    "stacks_fsdp_2": ("stacks", {"layers": 2}, "fsdp", {}),
    "stacks_fsdp_20": ("stacks", {"layers": 20}, "fsdp", {}),
    "stacks_fsdp_loop_20": ("stacks", {"layers": 20, "fused": False}, "fsdp", {}),
}


def build(device, name):
    """One training step of the named case, its tensors on `device`."""
    function, arguments = CASES[name]
    return function(device, **arguments)
