"""Training steps that call torch.distributed themselves, one rank of eight: data, tensor and pipeline parallelism.

Each builder begins the default process group unless there is one: as torchrun's processes do, or, to measure one rank's
memory on one GPU, a fake group that was begun before (tools/measure_own_ranks.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HEADS, LAYERS, VOCABULARY, SEQUENCE, BATCH = 1024, 16, 12, 32000, 1024, 4


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(DIM, HEADS) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def begin() -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl")


def training(model, optimizer, autocast=True):
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def ddp(device):
    begin()
    model = nn.parallel.DistributedDataParallel(Gpt().cuda(), device_ids=[0])
    return training(model, torch.optim.AdamW(model.parameters()))


def _sharded(model, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def fsdp2(device):
    begin()
    model = _sharded(Gpt().cuda())
    return training(model, torch.optim.AdamW(model.parameters()), autocast=False)


def fsdp2_kept(device):
    begin()
    model = _sharded(Gpt().cuda(), reshard_after_forward=False)
    return training(model, torch.optim.AdamW(model.parameters()), autocast=False)


def hsdp(device):
    begin()
    mesh = dist.init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(Gpt().cuda(), mesh=mesh)
    return training(model, torch.optim.AdamW(model.parameters()), autocast=False)


def fsdp1(device):
    begin()
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        Gpt().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, use_orig_params=True,
        device_id=0,
    )  # fmt: skip
    return training(model, torch.optim.AdamW(model.parameters()), autocast=False)


def _split(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}, RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, "out": rows, "down": rows})
    return model


def tensor(device):
    begin()
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _split(Gpt().cuda(), mesh)
    return training(model, torch.optim.AdamW(model.parameters(), foreach=False))


def fsdp_and_tensor(device):
    begin()
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))
    model = _sharded(_split(Gpt().cuda(), mesh["tp"]), mesh=mesh["dp"])
    return training(model, torch.optim.AdamW(model.parameters(), foreach=False), autocast=False)


def zero_optimizer(device):
    begin()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Gpt().cuda()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    inner = training(model, optimizer)
    gradients = [p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad)) for p in model.parameters()]
    del gradients
    return inner


CASES = {f.__name__: (f, {}) for f in (ddp, fsdp2, fsdp2_kept, hsdp, fsdp1, tensor, fsdp_and_tensor, zero_optimizer)}
