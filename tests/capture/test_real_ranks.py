"""Collectives and messages of a captured rank against those of real processes: four ranks on gloo, on the CPU.

The processes start once for all steps (this file run as a program). Each records what PyTorch asks of c10d in a steady
step, before gloo carries it out in its own way (it builds reduce-scatters of other collectives): kind, ranks, bytes,
order.
"""

import os
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asked_collectives import in_real_processes, record, told
from presage.capture import capture
from presage.capture.rank_objects import sharing_objects
from presage.capture.variants import Variant
from presage.errors import PresageError
from presage.prediction.api import predict_ranks, rank_graphs

RANKS, WIDTH, ROWS = 4, 64, 8


def layers(device, n=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)]).to(device)


def begin():
    if not dist.is_initialized():
        dist.init_process_group("nccl")


def training(model, device, foreach=None):
    x, opt = torch.randn(ROWS, WIDTH, device=device), torch.optim.SGD(model.parameters(), 0.01, foreach=foreach)

    def step():
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()

    return step


def buckets(device):
    begin()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)], nn.BatchNorm1d(512)).to(device)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
    x, opt = torch.randn(ROWS, 512, device=device), torch.optim.SGD(ddp.parameters(), 0.01)

    def step():
        opt.zero_grad()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        opt.step()

    return step


def fsdp2(device):
    from torch.distributed.fsdp import fully_shard

    begin()
    model = layers(device)
    for layer in model:
        fully_shard(layer)
    return training(fully_shard(model), device)


def hsdp(device):
    from torch.distributed.fsdp import fully_shard

    begin()
    mesh = dist.init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layers(device)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return training(fully_shard(model, mesh=mesh), device)


def split(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ways = [ColwiseParallel(), RowwiseParallel()]
    return parallelize_module(model, mesh, {str(i): ways[i % 2] for i in range(len(model))})


def tensor_parallel(device):
    begin()
    return training(split(layers(device), dist.init_device_mesh(device, (RANKS,))), device, foreach=False)


def sequence_parallel(device):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    begin()
    ways = {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel(output_layouts=Shard(0))}
    more = {"2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())}
    model = parallelize_module(layers(device, 3), dist.init_device_mesh(device, (RANKS,)), ways | more)
    return training(model, device, foreach=False)


def fsdp_and_tensor(device):
    from torch.distributed.fsdp import fully_shard

    begin()
    mesh = dist.init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    return training(fully_shard(split(layers(device), mesh["tp"]), mesh=mesh["dp"]), device, foreach=False)


def pipeline(schedule, stages=1, turning=False):
    """Stages by rank, and on to the first again; or, `turning`, back from the last."""

    def build(device):
        from torch.distributed import pipelining

        begin()
        rank = dist.get_rank()
        parts = [layers(device, 1) for _ in range(stages)]
        places = [rank, 2 * RANKS - 1 - rank] if turning else [rank + i * RANKS for i in range(stages)]
        last = 0 if turning else RANKS - 1
        whole = RANKS * stages
        mine = [
            pipelining.PipelineStage(part, i, whole, torch.device(device))
            for part, i in zip(parts, places, strict=True)
        ]
        how = getattr(pipelining.schedules, schedule)
        loss = nn.functional.mse_loss
        run = how(mine[0] if stages == 1 else mine, n_microbatches=8 if turning else 4, loss_fn=loss)
        x = torch.randn(ROWS, WIDTH, device=device)
        opt = torch.optim.SGD(nn.ModuleList(parts).parameters(), 0.01)

        def step():
            opt.zero_grad()
            run.step(*([x] if rank == 0 else []), **({"target": x} if rank == last else {}))
            opt.step()

        return step

    return build


ALIKE = {f.__name__: f for f in (buckets, fsdp2, hsdp, tensor_parallel, sequence_parallel, fsdp_and_tensor)}
CASES = ALIKE | {
    "GPipe": pipeline("ScheduleGPipe"),
    "1F1B": pipeline("Schedule1F1B"),
    "Interleaved1F1B": pipeline("ScheduleInterleaved1F1B", 2),
    "InterleavedZeroBubble": pipeline("ScheduleInterleavedZeroBubble", 2),
    "ZBVZeroBubble": pipeline("ScheduleZBVZeroBubble", 2, turning=True),
}
LONG = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What real ranks ask for in the long steps, or in the others."""
    return cache(lambda kind: in_real_processes(__file__, tmp_path_factory.mktemp("gloo"), RANKS, PRESAGE_CASES=kind))


def captured(name, rank):
    return capture(lambda _: CASES[name]("cuda"), variant=Variant(ranks=RANKS, rank=rank))


@pytest.mark.parametrize("name", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CASES])
def test_captured_ranks_ask_for_what_real_ones_do(real, name):
    with sharing_objects():
        for rank, asked in enumerate(real("long" if name in LONG else "quick")):
            if name in ALIKE and 0 < rank < RANKS - 1:
                continue
            found = told(captured(name, rank))
            assert found and found == asked[name], f"rank {rank}"


@pytest.mark.slow
def test_stages_of_a_pipeline_meet_in_their_messages():
    name = "Interleaved1F1B"
    found = predict_ranks(rank_graphs(lambda rank: captured(name, rank), RANKS), RANKS, draws=1)
    assert found.many.ranks == RANKS and len(found.many.kinds) == RANKS


def test_a_rank_that_waits_for_an_object_that_nobody_sends_is_a_deadlock():
    def build(_):
        begin()
        dist.recv_object_list([None], src=1) if dist.get_rank() == 0 else None
        return training(layers("cuda"), "cuda")

    with pytest.raises(PresageError, match="deadlock: rank 0 waits for object 1 of rank 1, which sends none"):
        capture(build, variant=Variant(ranks=2))


def test_ranks_that_wait_for_each_others_objects_are_a_deadlock_at_a_line():
    def build(_):
        begin()
        dist.recv_object_list([None], src=1 - dist.get_rank())
        return training(layers("cuda"), "cuda")

    with pytest.raises(PresageError, match=r"test_real_ranks.py:\d+: deadlock: rank 0 waits for an object of rank 1"):
        capture(build, variant=Variant(ranks=2))


def test_a_rank_receives_the_objects_that_another_broadcasts():
    seen = []

    def build(_):
        begin()
        sent = [f"from {dist.get_rank()}" if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(sent, src=0)
        seen.append((dist.get_rank(), *sent))
        return training(layers("cuda"), "cuda")

    capture(build, variant=Variant(ranks=2, rank=1))
    assert seen[-1] == (1, "from 0")


if __name__ == "__main__":
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # once, before the processes part

    CASES = {name: case for name, case in CASES.items() if (name in LONG) == (os.environ["PRESAGE_CASES"] == "long")}
    torch.multiprocessing.start_processes(record, (sys.argv[1], RANKS, CASES), RANKS, start_method="fork")
