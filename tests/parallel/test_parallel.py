"""Strategies on captured steps: what each rank runs, sends and holds."""

from __future__ import annotations

import gzip
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="capturing needs torch: pip install 'presage[torch]'")

from presage.capture import capture, load  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph.graph import (  # noqa: E402
    Graph,
    check,
)
from presage.graph.work import (  # noqa: E402
    collective,
    collective_bytes,
    total,
)
from presage.memory.step_memory import memory_profile  # noqa: E402
from presage.parallel.ddp import Ddp, ddp  # noqa: E402
from presage.parallel.fsdp import Fsdp, fsdp  # noqa: E402
from presage.parallel.gradients import MIB, ROOT, backward_passes, fsdp_units, gradients, make_buckets, parameters  # noqa: E402  # noqa: E402  # noqa: E402
from presage.parallel.strategy import STRATEGIES, strategy  # noqa: E402
from presage.parallel.zero import Zero, zero  # noqa: E402

ROOT_DIR = Path(__file__).parents[2]
MEASURED = json.loads((ROOT_DIR / "data/h200_ranks/measured.json").read_text())["cases"]
RANKS = 8
TRACE = "traces/hta/resnet50_ddp_a100_rank0of2_collective_meta.json.gz"
SMALL = {"width": 256, "heads": 4, "layers": 3, "vocab": 1024, "batch": 2, "sequence": 128}


@cache
def captured(function: str, **arguments: object) -> Graph:
    return capture(load(f"{ROOT_DIR}/{function}"), dict(arguments), source=function)


@cache
def workloads(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT_DIR / f"workloads/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small() -> Graph:
    return captured("examples/gpt.py:build", **SMALL)


def sent(graph: Graph, kind: str) -> list[int]:
    return [collective_bytes(graph, op) for op in graph.ops if collective(op) == kind]


def model_bytes(graph: Graph) -> int:
    return sum(p.nbytes for p in parameters(graph))


def kept(graph: Graph) -> int:
    """Bytes of the model that are there when a step begins."""
    made = {e.storage for e in graph.events if e.allocates}
    roles = ("parameter", "gradient", "optimizer")
    return sum(s.nbytes for s in graph.storages if s.role in roles and s.id not in made)


# Buckets


def test_buckets_fill_in_the_order_gradients_are_ready_up_to_their_size() -> None:
    found = gradients(
        captured("examples/gpt.py:build", layers=4), backward_passes(captured("examples/gpt.py:build", layers=4))[-1]
    )
    some = make_buckets(found, 25.0, 1.0)
    assert [g for b in some for g in b.gradients] == found
    assert [b.ready for b in some] == sorted(b.ready for b in some)
    assert some[0].nbytes >= 1 * MIB and some[0].nbytes - some[0].gradients[-1].tensor.nbytes < 1 * MIB
    for b in some[1:-1]:
        assert b.nbytes >= 25 * MIB  # full,
        assert b.nbytes - b.gradients[-1].tensor.nbytes < 25 * MIB  # and only just


def test_buckets_are_as_torch_makes_them() -> None:
    """The reducer's own function, given gradients in the order they are ready."""
    graph = captured("examples/gpt.py:build", layers=4)
    found = gradients(graph, backward_passes(graph)[-1])
    tensors = [torch.empty(g.tensor.shape, device="meta") for g in found]
    wanted, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [1 << 20, 25 << 20], [False] * len(found), list(range(len(found)))
    )
    assert [[found.index(g) for g in b.gradients] for b in make_buckets(found, 25.0, 1.0)] == wanted


def test_one_dtype_a_bucket() -> None:
    graph = captured("examples/gpt.py:build", **SMALL)
    found = gradients(graph, backward_passes(graph)[-1])
    assert {b.dtype for b in make_buckets(found)} == {"float32"}
    assert len(make_buckets(found, 1e-3, 1e-3)) > len(make_buckets(found))


# DDP


@pytest.mark.parametrize("view", [False, True])
def test_ddp_sends_every_gradient_once_and_computes_as_before(view: bool) -> None:
    graph = small()
    found = check(ddp(graph, RANKS, Ddp(gradient_as_bucket_view=view)))
    assert sum(sent(found, "all_reduce")) == model_bytes(graph)
    assert total(found).flops == total(graph).flops
    back = sum(op.within[:1] == ("reducer::copy_bucket_to_grad",) for op in found.ops)
    assert back == (0 if view else len(parameters(graph)))


def test_ddp_sends_a_bucket_only_when_its_gradients_are_there() -> None:
    found = ddp(small(), RANKS)
    written: set[int] = set()
    for op in found.ops:
        if collective(op):
            assert {t.storage for t in found.inputs_of(op)} <= written
        written |= {t.storage for t in found.outputs_of(op)}


def test_no_sync_sends_the_last_backward_pass_only() -> None:
    graph = captured("workloads/varied.py:decoder", **_accumulating())
    passes = len(backward_passes(graph))
    assert passes == 3
    last, each = ddp(graph, RANKS), ddp(graph, RANKS, Ddp(no_sync=False))
    assert len(sent(each, "all_reduce")) == passes * len(sent(last, "all_reduce"))


def _accumulating() -> dict[str, object]:
    return dict(workloads("varied").CASES["gqa_accumulate"][1])


def test_ddp_sends_buffers_before_the_forward_pass() -> None:
    found = ddp(captured("workloads/ranks.py:resnet", batch=8), RANKS)
    kinds = [collective(op) for op in found.ops if collective(op)]
    assert kinds[0] == kinds[1] == "broadcast"  # of two dtypes: means and variances, and counts
    assert "broadcast" not in kinds[2:]
    without = ddp(captured("workloads/ranks.py:resnet", batch=8), RANKS, Ddp(broadcast_buffers=False))
    assert not sent(without, "broadcast")


def test_ddp_sends_what_a_real_run_sent(shared: Path) -> None:
    """ResNet-50 on two A100s: the sizes of a step's collectives in its trace, in order."""
    events = json.loads(gzip.decompress((shared / TRACE).read_bytes()))["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"]), key=lambda e: e["ts"])
    bytes_of = {"Float": 4, "Long": 8}
    real = [e["args"]["In msg nelems"] * bytes_of[e["args"]["dtype"]] for e in kernels]
    graph = capture(load(f"{shared}/h200/workloads.py:build"), {"name": "resnet50_b32_fp32"})
    found = ddp(graph, 2)
    mine = [collective_bytes(found, op) for op in found.ops if collective(op)]
    assert real == mine * 3  # steps


def test_one_rank_is_the_step_itself() -> None:
    for apply in (ddp, fsdp, zero):
        assert apply(small(), 1) is small()


# FSDP and ZeRO


def test_units_are_the_blocks_and_the_rest() -> None:
    found = fsdp_units(small())
    assert [u.name for u in found] == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    assert {p.name for p in found[0].parameters} == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}


@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp_gathers_blocks_and_scatters_gradients(reshard: bool) -> None:
    graph = small()
    found = check(fsdp(graph, RANKS, Fsdp(reshard_after_forward=reshard)))
    blocks = 3
    assert len(sent(found, "all_gather")) == 1 + blocks * (2 if reshard else 1)
    assert len(sent(found, "reduce_scatter")) == 1 + blocks
    assert sum(sent(found, "reduce_scatter")) == model_bytes(graph)
    assert total(found).flops == total(graph).flops
    assert kept(found) == pytest.approx(kept(graph) / RANKS, rel=0.01)  # parameters, state, gradients: an eighth each


def test_fsdp_in_other_dtypes() -> None:
    graph = captured("workloads/ranks.py:gpt", bf16=True, autocast=False, layers=2, batch=1)
    found = check(fsdp(graph, RANKS, Fsdp(master_dtype="float32", reduce_dtype="float32")))
    assert sum(sent(found, "reduce_scatter")) == 2 * model_bytes(graph)  # float32 for bfloat16
    kept = [s for s in found.storages if s.role == "optimizer" and s.nbytes > 4]
    assert sum(s.nbytes for s in kept) == pytest.approx(2 * 2 * model_bytes(graph) / RANKS, rel=0.01)


def test_fsdp_gathers_for_every_backward_pass() -> None:
    graph = captured("workloads/varied.py:decoder", **_accumulating())
    found = check(fsdp(graph, RANKS))
    once = len([u for u in fsdp_units(graph) if u.name != ROOT])
    assert len(sent(found, "all_gather")) == 3 * (1 + 2 * once)
    assert len(sent(found, "reduce_scatter")) == 3 * (1 + once)


def test_fsdp_frees_gradients_of_every_backward_pass() -> None:
    """Each pass has its own, sent and freed; no pass adds whole gradients to those of another."""
    graph = captured("workloads/varied.py:decoder", **_accumulating())
    found = fsdp(graph, RANKS)
    whole = [g.storage for backward in backward_passes(graph) for g in gradients(graph, backward)]
    freed = {e.storage for e in found.events if not e.allocates}
    assert set(whole) <= freed
    adding = [op for op in found.ops if op.name == "aten::add_" and op.kernels and op.writes]
    added = [op for op in adding if found.storages[found.tensors[op.writes[0]].storage].role == "gradient"]
    assert added
    assert all(op.stream for op in added)  # parts, beside what was sent


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("master", ["", "float64"])
def test_zero_shards_the_update(stage: int, master: str) -> None:
    graph = small()
    found = check(zero(graph, RANKS, Zero(master_dtype=master), stage=stage))
    assert sum(sent(found, "all_reduce" if stage == 1 else "reduce_scatter")) == model_bytes(graph)
    assert sum(sent(found, "all_gather")) == model_bytes(graph)
    states = sum(s.nbytes for s in found.storages if s.role == "optimizer" and s.nbytes > 4)
    whole = sum(s.nbytes for s in graph.storages if s.role == "optimizer" and s.nbytes > 4)
    assert states == pytest.approx(whole / RANKS * (2 if master else 1), rel=0.01)


def test_the_more_is_sharded_the_less_a_rank_holds() -> None:
    graph = captured("examples/gpt.py:build", batch=1, layers=4)
    held = [
        memory_profile(f).before
        for f in (ddp(graph, RANKS), zero(graph, RANKS, stage=1), zero(graph, RANKS, stage=2), fsdp(graph, RANKS))
    ]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


# Memory of a rank, as measured on an H200 with PyTorch's own DDP and FSDP2 (workloads/ranks.py)

TWINS = workloads("ranks").TWINS
FIRST_BUCKETS_GONE = "stacks_ddp_20"


@pytest.mark.parametrize("case", [c for c in TWINS if c != FIRST_BUCKETS_GONE])
def test_memory_of_a_rank_is_as_measured(case: str) -> None:
    function, arguments, name, options = TWINS[case]
    graph = captured(f"workloads/ranks.py:{function}", **arguments)
    found = strategy(name, options).step(graph, RANKS)
    assert memory_profile(found).peak_allocated == pytest.approx(MEASURED[case]["peak_alloc"], rel=0.005)


def test_buckets_of_the_first_step_may_be_gone() -> None:
    """One run of eight did not keep them; then the buckets are all that DDP adds."""
    graph = captured("workloads/ranks.py:stacks", layers=20)
    found = memory_profile(ddp(graph, RANKS, Ddp(rebuilt_buckets=False))).peak_allocated
    assert found == pytest.approx(MEASURED[FIRST_BUCKETS_GONE]["peak_alloc"], rel=0.005)


# Strategies by name


def test_options_are_checked() -> None:
    assert strategy("ddp", {"bucket_cap_mb": "50", "gradient_as_bucket_view": "true"}).options == Ddp(
        50.0, gradient_as_bucket_view=True
    )
    for name, options, word in (
        ("dpd", {}, "choose from ddp"),
        ("ddp", {"bucket_mb": "5"}, "choose from bucket_cap_mb"),
        ("ddp", {"bucket_cap_mb": "-5"}, "above 0"),
        ("ddp", {"no_sync": "perhaps"}, "true or false"),
        ("fsdp", {"master_dtype": "float"}, "a dtype such as"),
        ("zero1", {"stage": "2"}, "no option 'stage'"),
        ("tp", {"x": "1"}, "has no options"),
    ):
        with pytest.raises(PresageError, match=word):
            strategy(name, options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gives_a_valid_step(name: str) -> None:
    tensor = 1 if name == "tp" else 2
    ranks = 4
    found = check(strategy(name, tensor=tensor).step(small(), ranks))
    groups = {op.group for op in found.ops if collective(op)}
    assert groups == ({"tp"} if name == "tp" else {"tp", "dp"})


def test_ranks_have_to_be_cut_evenly() -> None:
    with pytest.raises(PresageError, match="ranks = tensor x data"):
        strategy("ddp", tensor=3).step(small(), 8)


def test_a_step_without_training_is_told() -> None:
    from presage.graph import builder as edit

    forward = edit.select(small(), lambda op: op.phase == "forward")
    with pytest.raises(PresageError, match="no backward pass"):
        ddp(forward, RANKS)
