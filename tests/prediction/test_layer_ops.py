"""Op lists of layers: their FLOPs and bytes are the closed forms, and parallelism and recomputation cut or add exactly
what they should."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pytest

from presage.configs.check import MODULES as KNOWN_MODULES
from presage.configs.frameworks import Overlap, framework
from presage.configs.job import Job, Recompute
from presage.configs.transformer import Experts, Latent, Transformer
from presage.costs.closed_form import AttentionShape, ClosedFormKernels, GemmShape
from presage.costs.closed_form.op_shapes import MemoryBound, OpShape, shape_of
from presage.graph.graph import argument
from presage.graph.work import COLLECTIVES
from presage.graph.work import flops as op_flops
from presage.hardware import platform
from presage.parallel.plan import Axis, ParallelPlan
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel, overlap_loss
from presage.prediction.jobs.efficiency import LAWS
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.layer_graph import LayerBuilder, LayerGraph
from presage.prediction.jobs.stages import MODULES, layer_passes
from presage.prediction.jobs.transformer_layer import embedding_graph, head_graph, layer_graph

GPT = Transformer(2048, 4, 16, 32000, 8192, 16, 128, activation="gelu", norm="layernorm", bias=True)
GROUPED = Transformer(4096, 4, 32, 32000, 14336, 8, 128)
SINGLE = replace(GROUPED, kv_heads=1, activation="geglu")
SPARSE = replace(GROUPED, experts=Experts(16, 2, 1024, shared_ffn=2048, dense_layers=1))
LATENT = replace(GROUPED, kv_heads=32, latent=Latent(768, 512, 64, 128, 128))
SHORT = replace(GROUPED, kv_heads=32, latent=Latent(0, 512, 64, 128, 128))  # queries are made at once
MODELS = {"gelu": GPT, "grouped": GROUPED, "single": SINGLE, "experts": SPARSE, "latent": LATENT, "short": SHORT}
NONE = Overlap(*[False] * 6)
TENSOR = replace(NONE, tensor=True)
LAST = 3  # a layer with experts, where there are any


def job(model: Transformer, gpus: int = 8, parallel: ParallelPlan | None = None, **more: Any) -> Job:
    given = {"sequence": 2048, "micro_batch": 2, "global_batch": 16} | more
    place = platform("dgx-h100")
    software = framework("megatron-core", place.gpu, **given.pop("software", {}))
    return Job(model, place, gpus, parallel=parallel or ParallelPlan(), framework=software, **given)


class Sent(NamedTuple):
    """A collective of a layer."""

    op: str
    group: str
    nbytes: float


Found = OpShape | MemoryBound | Sent


def ops_of(layer: LayerGraph, way: str, names: Iterable[str] = ()) -> list[Found]:
    """What the laws see of the ops of one pass, block by block."""
    found: list[Found] = []
    for b in layer.blocks:
        for i in (b.forward if way == "forward" else b.backward) if not names or b.name in names else ():
            op = layer.graph.ops[i]
            sent = Sent(COLLECTIVES.get(op.name, ""), op.group, argument(op, "bytes"))
            found.append(sent if op.group else shape_of(layer.graph, op))
    return found


def ops(job: Job, way: str, layer: int = LAST, *, names: Iterable[str] = ()) -> list[Found]:
    return ops_of(layer_graph(job, layer), way, names)


def gemms(found: Iterable[Found]) -> list[GemmShape]:
    return [o.shape for o in found if isinstance(o, OpShape) and isinstance(o.shape, GemmShape)]


def flops(found: Iterable[Found]) -> float:
    """FLOPs of GEMMs."""
    return sum(shape.flops for shape in gemms(found))


def cost(model: BlockCostModel, way: str, layer: int = LAST, names: Iterable[str] = ()) -> BlockCost:
    """All blocks of these names, or of a whole pass."""
    total = BlockCost()
    for block, passes in model.block_costs(layer_graph(model.job, layer)):
        if not names or block.name in names:
            total += passes.forward if way == "forward" else passes.backward
    return total


def weights(m: Transformer) -> float:
    """Elements of the matrices that a token meets in the last layer, written out."""
    h, up = m.hidden, 3 if m.gated else 2
    if m.latent:
        z = m.latent
        query = h * z.query_rank + z.query_rank * m.heads * (z.rope + z.nope)
        query = query if z.query_rank else h * m.heads * (z.rope + z.nope)
        key = h * (z.key_rank + z.rope) + z.key_rank * m.heads * (z.nope + z.value)
        attention = query + key + m.heads * z.value * h
    else:
        attention = h * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    if m.experts is None:
        return attention + up * h * m.ffn
    e = m.experts
    return attention + h * e.experts + up * h * (e.top_k * e.ffn + e.shared_ffn)


def same(one: BlockCost, other: BlockCost) -> bool:
    return all(getattr(one, f.name) == pytest.approx(getattr(other, f.name), rel=1e-12) for f in fields(BlockCost))


# ---- FLOPs


@pytest.mark.parametrize("name", MODELS)
def test_two_flops_a_weight_and_token_forward_and_twice_that_backward(name: str) -> None:
    m = MODELS[name]
    one = job(m, gpus=1)
    expected = 2.0 * weights(m) * one.rank_tokens
    assert flops(ops(one, "forward")) == expected
    assert flops(ops(one, "backward")) == 2 * expected


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_weights_are_half_of_the_backward_pass(name: str) -> None:
    one = job(MODELS[name], gpus=1)
    graph = layer_graph(one, LAST).graph
    sums = sum(op_flops(graph, op) for op in graph.ops if op.writes and not op.group)
    router = flops(ops(one, "forward", names=["router"]))  # whose gradients are summed by no kernel of their own
    assert sums == flops(ops(one, "forward")) - router


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_the_parameters_that_are_counted(name: str) -> None:
    m = MODELS[name]
    e, layer = m.experts, m.layer_parameters(LAST)
    idle = (e.experts - e.top_k) * m.block_parameters(e.ffn) if e else 0
    vectors = 2 * m.norm_parameters + (m.latent.query_rank + m.latent.key_rank if m.latent else 0)
    biases = m.hidden * 2 + m.ffn + 3 * m.hidden if m.bias else 0
    assert layer - idle - vectors - biases == weights(m)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallelism_divides_the_work(name: str, tp: int, sequence: bool) -> None:
    m = replace(MODELS[name], kv_heads=max(8, MODELS[name].kv_heads))
    whole, cut = job(m), job(m, parallel=ParallelPlan(tp=tp, sequence_parallel=sequence))
    every_rank = {"down_proj"} if not sequence else set()  # narrow, so it is not worth cutting
    names = [b.name for b in layer_graph(whole, LAST).blocks if b.name not in every_rank]
    for way in ("forward", "backward"):
        assert tp * flops(ops(cut, way, names=names)) == flops(ops(whole, way, names=names))
        for a, b in zip(attends(whole, way), attends(cut, way), strict=True):
            assert tp * b.heads == a.heads and tp * b.kv_heads == a.kv_heads


def test_fewer_key_heads_than_ranks_are_copied() -> None:
    cut = job(SINGLE, parallel=ParallelPlan(tp=8))
    assert attends(cut, "forward")[0].kv_heads == 1
    (qkv,) = gemms(ops(cut, "forward", names=["qkv"]))
    assert qkv.n == 4 * 128 + 2 * 128


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 1), (4, 1), (8, 1), (2, 4), (1, 8)])
def test_experts_have_the_same_work_wherever_they_are(ep: int, expert_tp: int) -> None:
    one, spread = job(SPARSE, gpus=1), job(SPARSE, parallel=ParallelPlan(ep=ep, expert_tp=expert_tp))
    names = ["moe_up", "moe_down"]
    assert flops(ops(spread, "forward", names=names)) == flops(ops(one, "forward", names=names))
    groups = {g.groups for g in gemms(ops(spread, "forward", names=names))}
    assert groups == {16 // ep}


def test_busy_experts_have_more_to_do() -> None:
    e = SPARSE.experts
    assert e is not None
    even = flops(ops(job(SPARSE), "forward", names=["moe_up"]))
    busy = flops(ops(job(replace(SPARSE, experts=replace(e, imbalance=1.5))), "forward", names=["moe_up"]))
    padded = flops(ops(job(replace(SPARSE, experts=replace(e, capacity=1.25))), "forward", names=["moe_up"]))
    assert busy == 1.5 * even and padded == 1.25 * even


def test_the_head_is_one_product_with_the_vocabulary() -> None:
    one = job(GROUPED)
    assert flops(ops_of(head_graph(one), "forward")) == 2.0 * one.rank_tokens * GROUPED.hidden * GROUPED.vocab
    assert flops(ops_of(embedding_graph(one), "forward")) == 0


# ---- attention


def attends(job: Job, way: str) -> list[AttentionShape]:
    return [o.shape for o in ops(job, way) if isinstance(o, OpShape) and isinstance(o.shape, AttentionShape)]


def attention(job: Job, way: str = "forward", layer: int = LAST) -> BlockCost:
    return cost(BlockCostModel(job, LAWS), way, layer)


@pytest.mark.parametrize("name", MODELS)
def test_causal_attention_does_half_of_all_scores(name: str) -> None:
    m, one = MODELS[name], job(MODELS[name], gpus=1)
    whole = 2.0 * one.micro_batch * one.sequence**2 * (m.query_width + m.value_width)
    assert attention(one).attention_flops == whole / 2
    assert attention(one, "backward").attention_flops == 2.5 * whole / 2
    assert attention(job(replace(m, causal=False), gpus=1)).attention_flops == whole


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_context_parallelism_divides_attention_and_all_else(cp: int, causal: bool) -> None:
    m = replace(GROUPED, causal=causal)
    whole, cut = job(m, sequence=16384), job(m, sequence=16384, parallel=ParallelPlan(cp=cp))
    assert cp * attention(cut).attention_flops == attention(whole).attention_flops
    assert cp * flops(ops(cut, "backward")) == flops(ops(whole, "backward"))
    sent = [o for o in ops(cut, "forward") if isinstance(o, Sent)]
    keys_and_values = 2 * 16384 * 8 * (128 + 128) * 2  # samples, tokens, heads, widths, bytes
    assert sent == [("all_gather", "cp", keys_and_values)]


def test_a_window_saves_time_where_it_is_shorter_than_the_sequence() -> None:
    took = {w: attention(job(replace(GROUPED, window=w), sequence=8192)).attention for w in (0, 1024, 4096, 8192)}
    assert took[1024] < took[4096] < took[0]
    assert took[8192] == took[0]
    every = job(replace(GROUPED, window=1024, window_every=2), sequence=8192)
    assert attention(every, layer=0).attention == took[1024]
    assert attention(every, layer=1).attention == took[0]


def test_scores_in_memory_are_four_products_back() -> None:
    one = job(GPT, gpus=1, software={"attention": "unfused"})
    scores = 2.0 * one.micro_batch * one.sequence**2 * GPT.hidden
    assert flops(ops(one, "forward", names=["core_attn"])) == 2 * scores
    assert flops(ops(one, "backward", names=["core_attn"])) == 4 * scores


# ---- what is sent


def ring_bytes(found: Iterable[Found], ranks: int) -> float:
    """Bytes a rank sends, in rings: an all-reduce is a scatter and a gather."""
    each = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return sum(each[o.op] * o.nbytes * (ranks - 1) / ranks for o in found if isinstance(o, Sent) and o.group == "tp")


@pytest.mark.parametrize("name", ["gelu", "grouped"])
def test_sequence_parallelism_sends_as_much_forward(name: str) -> None:
    """A gather and a scatter are an all-reduce; backward the input is gathered once more."""
    plain, split = (job(MODELS[name], parallel=ParallelPlan(tp=4, sequence_parallel=s)) for s in (False, True))
    hidden = plain.rank_tokens * MODELS[name].hidden * 2
    assert ring_bytes(ops(plain, "forward"), 4) == ring_bytes(ops(split, "forward"), 4) == 2 * 2 * hidden * 3 / 4
    assert ring_bytes(ops(split, "backward"), 4) == 1.5 * ring_bytes(ops(plain, "backward"), 4)


def test_one_rank_sends_nothing() -> None:
    for model in MODELS.values():
        one = job(model, gpus=1)
        for graph in (layer_graph(one, LAST), head_graph(one), embedding_graph(one)):
            assert not [op for op in graph.graph.ops if op.group]


def test_tokens_go_to_their_experts_and_back() -> None:
    one = job(SPARSE, parallel=ParallelPlan(ep=8))
    sent = [o for way in ("forward", "backward") for o in ops(one, way) if isinstance(o, Sent)]
    assert set(sent) == {("all_to_all", "ep", one.rank_tokens * 2 * 4096 * 2.0)}
    assert len(sent) == 4


def overlapped(tokens: int, whole: bool = True) -> LayerGraph:
    """A weight gradient, and an all-reduce that may run under it."""
    b = LayerBuilder("bf16")
    gemm = b.weight_gradient(tokens, 4096, 14336, "bf16")
    b.block("both", [], [gemm, b.collective("all_reduce", 64e6, Axis.TP, gemm, whole)])
    return b.layer()


@pytest.mark.parametrize("tokens", [256, 8192])
def test_under_a_gemm_a_transfer_costs_what_is_not_hidden(tokens: int) -> None:
    """As a whole: what is longer than the GEMM, and the SMs it holds meanwhile. Cut up by ranks: all but the first part
    hides."""
    split = ParallelPlan(tp=8)
    apart = job(GROUPED, parallel=split, software={"async_backward": False}, overlap=NONE)
    whole, cut = job(GROUPED, parallel=split, overlap=NONE), job(GROUPED, parallel=split, overlap=TENSOR)
    by, alone = (c.product + c.tp for c in BlockCostModel(apart, LAWS).op_costs(overlapped(tokens)))
    assert alone == BlockCostModel(apart, LAWS).collective_seconds("all_reduce", 64e6, Axis.TP)
    lost = overlap_loss(apart.platform.gpu) * min(alone, by)
    as_a_whole, in_parts = (BlockCostModel(j, LAWS).op_costs(overlapped(tokens))[1].tp for j in (whole, cut))
    assert as_a_whole == pytest.approx(max(0.0, alone - by) + lost)
    assert in_parts == pytest.approx(max(alone / 8, alone - by * 7 / 8))
    assert in_parts < alone and as_a_whole < alone
    assert 0 < overlap_loss(apart.platform.gpu) < 0.5
    assert BlockCostModel(whole, LAWS).op_costs(overlapped(tokens, whole=False))[1].tp == alone


# ---- recomputation


@pytest.mark.parametrize("name", MODELS)
def test_full_recomputation_is_one_more_forward_pass(name: str) -> None:
    again, half = job(MODELS[name], recompute=Recompute("full")), Recompute("full", share=0.5)
    none = layer_passes(job(MODELS[name]), BlockCostModel(job(MODELS[name]), LAWS), LAST)
    found = layer_passes(again, BlockCostModel(again, LAWS), LAST)
    assert same(found.again, found.forward) and same(none.again, BlockCost())
    assert same(found.forward, none.forward) and same(found.backward, none.backward)
    every_second = replace(again, recompute=half)
    assert same(layer_passes(every_second, BlockCostModel(every_second, LAWS), LAST).again, found.forward * 0.5)


BLOCKS = {
    "core_attn": {"core_attn"},
    "mlp": {"mlp_up", "act", "mlp_down", "shared_up", "shared_down"},
    "moe_act": {"act"},
    "moe": {"router", "dispatch", "moe_up", "act", "moe_down", "combine"},
    "norm": {"norm1", "norm2", "norm"},
    "layernorm": {"norm1", "norm2", "norm"},
    "mla_up_proj": {"up_proj", "rope"},
}


@pytest.mark.parametrize("module", BLOCKS)
@pytest.mark.parametrize("name", ["grouped", "experts", "latent"])
def test_selective_recomputation_repeats_its_blocks_only(name: str, module: str) -> None:
    one = job(MODELS[name], recompute=Recompute("selective", (module,)))
    model = BlockCostModel(one, LAWS)
    expected = cost(model, "forward", names=BLOCKS[module] | {"none of these"})
    assert same(layer_passes(one, model, LAST).again, expected)


def test_recomputation_by_op_repeats_every_second_product() -> None:
    one = job(GROUPED, recompute=Recompute("selective", ("op",)))
    pricer = BlockCostModel(one, LAWS)
    assert layer_passes(one, pricer, LAST).again.flops == flops(ops(one, "forward")) / 2


def test_modules_have_one_list() -> None:
    assert set(KNOWN_MODULES) == set(MODULES) == {*BLOCKS, "op", "mamba"}


def test_chips_know_every_kind_of_stream() -> None:
    """None falls back on the share of others."""
    kinds = set()
    for model in MODELS.values():
        for changes in ({}, {"dropout": True, "attention": "unfused"}, {"fused_norms": False, "fused_loss": False}):
            one = job(model, software=changes, precision="fp8")
            found = [layer_graph(one, LAST), head_graph(one), embedding_graph(one)]
            every = [o for graph in found for way in ("forward", "backward") for o in ops_of(graph, way)]
            kinds |= {o.kind for o in every if isinstance(o, MemoryBound)}
    assert {"norm", "softmax", "dropout", "cast", "permute", "loss", "embedding"} <= kinds
    assert kinds <= ClosedFormKernels.of(platform("dgx-h100").gpu).parameters.stream.keys()


# ---- too little work


@pytest.mark.parametrize("model", [SPARSE, LATENT, GPT])
@pytest.mark.parametrize(
    "parallel", [ParallelPlan(tp=8), ParallelPlan(tp=8, sequence_parallel=True), ParallelPlan(cp=8), ParallelPlan(tp=4)]
)
def test_a_rank_without_a_whole_token_has_one(model: Transformer, parallel: ParallelPlan) -> None:
    """One token for eight ranks: no division by zero, and no work that costs nothing."""
    for style in ("flash3", "unfused"):
        one = job(model, parallel=parallel, sequence=1, micro_batch=1, software={"attention": style})
        found = job_step(one)
        assert 0 < found.seconds < 1
        assert all(min(g.m, g.n, g.k) >= 1 for g in gemms(ops(one, "forward")))


def test_blocks_leave_out_what_there_is_none_of() -> None:
    b = LayerBuilder("bf16")
    b.block("x", [None, b.gemm(1, 1, 1, "bf16")], [None])
    (block,) = b.layer().blocks
    assert block == ("x", (0,), (), True)
