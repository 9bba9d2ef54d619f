"""Code that calls torch.distributed itself: captured as one rank of many, with no other process."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from presage.capture import capture, load_cases
from presage.capture.process_groups import _Shards
from presage.capture.variants import Variant
from presage.errors import PresageError
from presage.graph.work import collective, collective_bytes
from presage.hardware import gpu
from presage.memory.step_memory import memory_profile
from presage.prediction.api import predict_ranks, rank_graphs
from presage.prediction.stream_dependencies import crossings

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 64
NUMBERS = WIDTH * WIDTH + WIDTH  # of a layer


def layers(n=4):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)]).cuda()


def training(model):
    x, opt = torch.randn(8, WIDTH, device="cuda"), torch.optim.SGD(model.parameters(), 0.1)

    def step():
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()

    return step


def collectives(graph):
    return [(collective(op), op.group, collective_bytes(graph, op)) for op in graph.ops if collective(op)]


def ddp(_):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return training(nn.parallel.DistributedDataParallel(layers(), device_ids=[0]))


def fsdp2(_):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    model = layers()
    for layer in model:
        fully_shard(layer)
    return training(fully_shard(model))


def test_ddp_reduces_its_buckets():
    graph = capture(ddp, variant=Variant(ranks=8))
    assert collectives(graph) == [("all_reduce", "world", 4 * 4 * NUMBERS)]
    assert graph.ranks == tuple(range(8)) and graph.groups == {"world": tuple(range(8))}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_process_that_the_code_starts_for_each_gpu_is_this_ranks(rank):
    steps = []

    def worker(number, count):
        dist.init_process_group("nccl", rank=number, world_size=count)
        steps.append(training(nn.parallel.DistributedDataParallel(layers().to(number), device_ids=[number])))

    def build(_):
        torch.multiprocessing.spawn(worker, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
        return steps.pop()

    graph = capture(build, variant=Variant(ranks=4, rank=rank))
    assert collectives(graph) == [("all_reduce", "world", 4 * 4 * NUMBERS)]
    assert sorted(graph.ranks) == [0, 1, 2, 3]


def test_ddp_that_looks_for_unused_parameters_also_tells_which_were_used():
    def build(_):
        dist.init_process_group("nccl")
        return training(nn.parallel.DistributedDataParallel(layers(), find_unused_parameters=True))

    found = collectives(capture(build, variant=Variant(ranks=8)))
    assert sorted(nbytes for _, _, nbytes in found) == [4 * 8, 4 * 4 * NUMBERS]  # a number for each of 8 parameters


def test_fsdp_gathers_each_layer_twice_and_scatters_its_gradients():
    found = collectives(capture(fsdp2, variant=Variant(ranks=4)))
    kinds = [kind for kind, _, _ in found]
    assert kinds.count("all_gather") == 4 + 4 and kinds.count("reduce_scatter") == 4
    assert {nbytes for _, _, nbytes in found} == {4 * NUMBERS}


def test_the_optimizer_of_sharded_parameters_works_on_shards():
    graph = capture(fsdp2, variant=Variant(ranks=4))
    rows = {t.shape for op in graph.ops if op.phase == "optimizer" for t in graph.inputs_of(op)}
    assert (WIDTH // 4, WIDTH) in rows and (WIDTH, WIDTH) not in rows


def test_numbers_of_other_ranks_are_taken_to_be_this_ones():
    seen = {}

    def build(_):
        dist.init_process_group("nccl")
        step = training(layers(1))

        def whole():
            step()
            ones, parts = torch.ones(2, device="cuda"), [torch.zeros(1, device="cuda") for _ in range(4)]
            dist.all_reduce(ones)
            dist.all_gather(parts, torch.full((1,), 3.0, device="cuda"))
            counts, mine = torch.zeros(4, device="cuda"), torch.arange(4.0, device="cuda")
            dist.all_to_all_single(counts, mine)
            seen.update(sum=ones.tolist(), gathered=[p.item() for p in parts], counts=counts.tolist())

        return whole

    capture(build, variant=Variant(ranks=4, rank=2))
    assert seen == {"sum": [4.0, 4.0], "gathered": [3.0] * 4, "counts": [2.0] * 4}


def test_a_mesh_names_its_groups_after_its_dimensions():
    def build(_):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicas", "tensor"))
        step = training(layers(1))

        def whole():
            step()
            dist.all_reduce(torch.ones(8, device="cuda"), group=mesh.get_group("tensor"))
            dist.all_reduce(torch.ones(8, device="cuda"), group=mesh.get_group("replicas"))

        return whole

    graph = capture(build, variant=Variant(ranks=8, rank=5))
    assert graph.groups == {"tensor": (4, 5, 6, 7), "replicas": (1, 5)}


def pipeline(_):
    dist.init_process_group("nccl")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    step = training(layers(1 + rank))

    def whole():
        x = torch.ones(1024, device="cuda")
        if rank > 0:
            dist.recv(x, rank - 1)
        step()
        if rank < last:
            dist.send(x, rank + 1)

    return whole


def reducing(waits):
    """Two products after an asynchronous all-reduce, of which the code waits before this one of them."""

    def build(_):
        dist.init_process_group("nccl")
        x, gradients = (torch.randn(n, n, device="cuda") for n in (4096, 8192))
        step = training(layers(1))

        def whole():
            step()
            work = dist.all_reduce(gradients, async_op=True)
            for i in range(2):
                if i == waits:
                    work.wait()
                x @ x

        return whole

    return build


def last_kernel(ops):
    return max(i for i, op in enumerate(ops) if op.kernels)


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_all_that_runs_after_a_wait_comes_after_the_collective(waits):
    graph = capture(reducing(waits), variant=Variant(ranks=2))
    reduces = next(i for i, op in enumerate(graph.ops) if collective(op))
    products = [i for i in range(reduces, len(graph.ops)) if graph.ops[i].name == "aten::mm"]
    waiting = {b for a, b in crossings(graph).within if a == reduces}
    assert waiting == set(products[waits : waits + 1])
    assert {a for a, b in crossings(graph).within if b == reduces} == {last_kernel(graph.ops[:reduces])}
    exposed = predict_ranks([graph], 2, draws=1).many.exposed
    assert (exposed > 5e-4) == (waits == 0)


def captures(build, ranks):
    return rank_graphs(lambda rank: capture(build, variant=Variant(ranks=ranks, rank=rank)), ranks)


def test_stages_that_send_to_each_other_are_captured_one_by_one():
    graphs = captures(pipeline, 3)
    assert [g.ranks for g in graphs] == [(0,), (1,), (2,)]
    assert [set(g.groups) for g in graphs] == [{"world 0 to 1"}, {"world 0 to 1", "world 1 to 2"}, {"world 1 to 2"}]
    found = predict_ranks(graphs, 3, draws=1)
    assert found.many.ranks == 3 and found.many.strategy == "as written"


def rows_by_rank(rows):
    """A step that also copies parts of a tensor, of so many rows each."""

    def build(_):
        dist.init_process_group("nccl")
        step, x = training(layers()), torch.randn(1024, WIDTH, device="cuda")

        def whole():
            step()
            for part in x.split(rows(dist.get_rank())):
                part.clone()

        return whole

    return build


def test_ranks_whose_parts_are_cut_elsewhere_are_one():
    assert [g.ranks for g in captures(rows_by_rank(lambda r: [400 + 100 * r, 624 - 100 * r]), 4)] == [(0, 1, 2, 3)]


def test_ranks_that_differ_are_folded_by_what_they_run():
    found = captures(rows_by_rank(lambda r: [512, 512] if r % 4 == 1 else [256] * 4 if r % 4 == 3 else [1024]), 8)
    assert [g.ranks for g in found] == [(0, 2, 4, 6), (1, 5), (3, 7)]


def test_equal_ranks_are_captured_once_and_folded():
    asked = []
    graphs = rank_graphs(lambda rank: asked.append(rank) or capture(ddp, variant=Variant(ranks=64, rank=rank)), 64)
    assert asked == [0, 63] and len(graphs) == 1 and graphs[0].ranks == tuple(range(64))


def unmatched(_):
    dist.init_process_group("nccl")
    step = training(layers(1))

    def whole():
        step()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(16, device="cuda"))
        dist.all_reduce(torch.ones(1024, device="cuda"))

    return whole


def test_collectives_that_do_not_match_are_the_deadlock_they_would_be():
    with pytest.raises(PresageError, match=r"deadlock: .* in world .*test_own_ranks.py:\d+.*test_own_ranks.py:\d+"):
        predict_ranks(captures(unmatched, 2), 2)


def padded(_):
    """Three gradients among four ranks: the last has none of its own, and the others write over what they send."""
    dist.init_process_group("nccl")
    grads, rank = [torch.randn(WIDTH, device="cuda") for _ in range(3)], dist.get_rank()
    own = grads[rank] if rank < 3 else torch.zeros(WIDTH, device="cuda")
    return lambda: dist.reduce_scatter(own, [*grads, torch.zeros(WIDTH, device="cuda")])


def test_what_a_rank_writes_over_counts_as_sent():
    graphs = captures(padded, 4)
    assert {name for g in graphs for name in collectives(g)} == {("reduce_scatter", "world", 4 * WIDTH * 4)}


@pytest.mark.parametrize("length", [8, 7, 3, 1])
def test_shards_of_a_parameter_are_those_that_pytorch_cuts(length):
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    x = torch.randn(length, 2)
    for dim, count in ((0, 4), (1, 2), (1, 4)):
        shards = _Shards(x, count, dim)
        assert all(torch.equal(shards[i], own) for i, own in enumerate(_chunk_with_empty(x, count, dim)))


def test_timeouts_of_groups_can_be_set():
    """As torchtitan's trainer does after its first step."""

    def build(_):
        dist.init_process_group("nccl")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), dist.new_group([0, 1]))
        return training(layers(1))

    assert captures(build, 2)


def test_a_strategy_is_refused_for_code_that_spreads_itself():
    with pytest.raises(PresageError, match="spreads itself over ranks already"):
        predict_ranks(captures(ddp, 2), 2, "fsdp")


def test_more_ranks_make_the_step_longer_by_its_collectives():
    few, many = (predict_ranks(captures(ddp, n), n, draws=1) for n in (2, 8))
    assert many.many.communication > few.many.communication > 0


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "zero_optimizer"])
def test_the_memory_of_one_rank_is_that_of_a_real_one(name):
    measured = json.loads((ROOT / "data/h200_ranks/own_ranks.json").read_bytes())["cases"][name]
    graph = capture(load_cases(ROOT / "workloads/own_ranks.py")[name], variant=Variant(ranks=measured["ranks"]))
    peak = memory_profile(graph, chip=gpu("h200")).peak_allocated
    assert peak == pytest.approx(measured["peak_alloc"], rel=0.01)
