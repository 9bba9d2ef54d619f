"""What ranks send one another: stages of pipelines, objects, sizes; and calls that do not match."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from presage.capture import capture
from presage.capture.variants import Variant
from presage.errors import PresageError
from presage.graph.work import collective, collective_bytes
from presage.prediction.api import predict_ranks, rank_graphs

WIDTH, ROWS = 256, 64
MICROBATCHES = 4


def captures(build, ranks):
    return rank_graphs(lambda rank: capture(build, variant=Variant(ranks=ranks, rank=rank)), ranks)


def calls(graph):
    return [(collective(op), op.group, collective_bytes(graph, op)) for op in graph.ops if collective(op)]


def trained(communicate):
    """The step of a layer, after which ranks communicate."""

    def build(_):
        dist.init_process_group("nccl")
        model = nn.Linear(WIDTH, WIDTH).cuda()
        opt, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(ROWS, WIDTH, device="cuda")

        def step():
            opt.zero_grad()
            model(x).sum().backward()
            communicate(dist.get_rank(), dist.get_world_size())
            opt.step()

        return step

    return build


def pipelined(schedule, ranks):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    kind = getattr(pytest.importorskip("torch.distributed.pipelining.schedules"), schedule, None)
    if kind is None:
        pytest.skip(f"this PyTorch has no {schedule}")

    def build(_):
        dist.init_process_group("nccl")
        rank, device = dist.get_rank(), torch.device("cuda")
        several = schedule not in ("ScheduleGPipe", "Schedule1F1B")
        count = ranks * (1 + several)
        second = count - 1 - rank if schedule == "ScheduleZBVZeroBubble" else rank + ranks
        own = [rank, second] if several else [rank]
        parts = [nn.Linear(WIDTH, WIDTH).cuda() for _ in own]
        stages = [pipelining.PipelineStage(m, i, count, device) for m, i in zip(parts, own, strict=True)]
        plan = kind(stages if several else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        opt = torch.optim.SGD([p for m in parts for p in m.parameters()], 0.1)
        x = torch.randn(ROWS, WIDTH, device="cuda")

        def step():
            opt.zero_grad()
            plan.step(*([x] if 0 in own else []), **({"target": x} if count - 1 in own else {}))
            opt.step()

        return step

    return build


@pytest.mark.parametrize(
    ("schedule", "onward"),
    [
        ("Schedule1F1B", 1),
        pytest.param("ScheduleGPipe", 1, marks=pytest.mark.slow),
        pytest.param("ScheduleInterleaved1F1B", 3, marks=pytest.mark.slow),
        pytest.param("ScheduleZBVZeroBubble", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_of_a_pipeline_send_each_microbatch_on_and_its_gradient_back(schedule, onward):
    graphs = captures(pipelined(schedule, 2), 2)
    assert [g.ranks for g in graphs] == [(0,), (1,)]
    part = ROWS // MICROBATCHES * WIDTH * 4
    for graph in graphs:
        found = calls(graph)
        assert {nbytes for _, _, nbytes in found} == {part}
        assert [group for _, group, _ in found].count("world 0 to 1") == onward * MICROBATCHES
        assert [group for _, group, _ in found].count("world 1 to 0") == onward * MICROBATCHES
    assert predict_ranks(graphs, 2, draws=1).many.ranks == 2


def test_objects_are_those_that_the_sender_has():
    seen = {}

    def talk(rank, ranks):
        told, part, whole = [{"n": 3}] if rank == 0 else [None], [None], torch.tensor([7 * (rank == 0)], device="cuda")
        dist.broadcast_object_list(told, src=0)
        dist.scatter_object_list(part, [10 * r for r in range(ranks)] if rank == 0 else None, src=0)
        dist.broadcast(whole, src=0)
        sizes = torch.tensor([rank + 1], device="cuda")
        if rank == 0:
            dist.send_object_list(["a"], dst=1)
            dist.recv(sizes, src=1)
        elif rank == 1:
            received = [None]
            dist.recv_object_list(received, src=0)
            dist.send(sizes, dst=0)
            seen["received"] = received
        seen[rank] = told[0]["n"], part[0], whole.item(), sizes.item()

    captures(trained(talk), 2)
    assert seen == {0: (3, 0, 7, 2), 1: (3, 10, 7, 2), "received": ["a"]}


def test_what_one_rank_gathers_scatters_and_reduces_is_as_large_on_all():
    def spread(rank, ranks):
        x = torch.ones(1024, device="cuda")
        dist.gather(x, [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None, dst=0)
        dist.scatter(x, [torch.ones_like(x) for _ in range(ranks)] if rank == 0 else None, src=0)
        dist.reduce(x, dst=0)

    graphs = captures(trained(spread), 4)
    sizes = [("all_gather", "world", 4 * 4096), ("broadcast", "world", 4 * 4096), ("broadcast", "world", 4096)]
    assert [calls(g) for g in graphs] == [sizes] * len(graphs)
    assert predict_ranks(graphs, 4, draws=1).many.ranks == 4


def test_ranks_that_do_not_communicate_in_a_step_get_no_strategy():
    found = predict_ranks(captures(trained(lambda *_: None), 4), 4, draws=1)
    assert found.many.strategy == "as written" and found.many.communication == 0


@pytest.mark.slow
def test_a_barrier_reduces_a_number_and_one_between_hosts_does_not():
    assert calls(captures(trained(lambda *_: dist.barrier()), 2)[0]) == [("all_reduce", "world", 4)]
    hosts = trained(lambda *_: dist.barrier(dist.new_group(backend="gloo")))
    assert not calls(captures(hosts, 2)[0])


def ring(sequence, dtype=torch.bfloat16):
    """Attention over a sequence that four ranks hold parts of."""
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    if not hasattr(experimental, "context_parallel"):
        pytest.skip("this PyTorch has no context_parallel")

    def build(_):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (4,), mesh_dim_names=("cp",))
        model, x = nn.Linear(128, 384).cuda(), torch.randn(1, sequence, 128, device="cuda")
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            opt.zero_grad()
            with experimental.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                q, k, v = model(x).to(dtype).view(1, -1, 3, 2, 64).permute(2, 0, 3, 1, 4)
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            opt.step()

        return step

    return build


@pytest.mark.slow
def test_context_parallel_attention_sends_keys_and_values_around():
    found = calls(capture(ring(512), variant=Variant(ranks=4)))
    part = 2 * 128 * 128  # keys and values of a rank's part
    gathered, gradients = ("all_gather", "world", 4 * part * 2), ("all_to_all", "world", part * 4)
    assert found == [gathered] * 2 + [gradients] * 4


def test_context_parallel_attention_on_lengths_that_fail_on_a_gpu_says_so():
    with pytest.raises(PresageError, match="has to be a multiple of 32"):
        capture(ring(128, torch.float32), variant=Variant(ranks=4))


def big():
    return torch.ones(1024, device="cuda")


def one_receives(rank, _):
    if rank == 0:
        dist.recv(big(), src=1)


def both_receive_first(rank, _):
    x = big()
    dist.recv(x, src=1 - rank)
    dist.send(x, dst=1 - rank)


@pytest.mark.parametrize("talk", [one_receives, both_receive_first])
def test_messages_that_do_not_meet_are_the_deadlock_they_would_be(talk):
    with pytest.raises(PresageError, match=r"deadlock: .*rank 0 .*test_messages.py:\d+.*rank 1 .*for ever"):
        predict_ranks(captures(trained(talk), 2), 2)


def test_a_receive_from_any_rank_is_refused_by_name():
    with pytest.raises(PresageError, match="recv_any_source_ is not captured: give recv its source"):
        captures(trained(lambda *_: dist.recv(big())), 2)


def test_numbers_on_the_gpu_make_a_tensor_one_by_one():
    def build(_):
        def step():
            x = torch.ones(2, device="cuda", requires_grad=True)
            (x * float(torch.tensor([[x.sum(), x.sum()]]).sum())).sum().backward()

        return step

    assert sum(op.sync for op in capture(build).ops) >= 2
