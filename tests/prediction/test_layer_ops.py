"""Op lists of layers: their FLOPs and bytes are the closed forms, and parallelism and recomputation cut or add exactly
what they should."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from presage.configs.check import MODULES as KNOWN_MODULES
from presage.configs.frameworks import framework
from presage.configs.job import Job, Overlap, Recompute
from presage.configs.transformer import Experts, Latent, Transformer
from presage.hardware import platform
from presage.parallel.plan import Axis, ParallelPlan
from presage.prediction.jobs.block_cost import Cost, Pricer, held
from presage.prediction.jobs.efficiency import LAWS
from presage.prediction.jobs.embedding_head import embedding_block, head_blocks
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.ops import Attend, Block, Op, Product, Stream, Talk
from presage.prediction.jobs.stages import MODULES, layer_passes
from presage.prediction.jobs.transformer_layer import layer_blocks

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


def ops(job: Job, way: str, layer: int = LAST, *, names: Iterable[str] = ()) -> list[Op]:
    blocks = [b for b in layer_blocks(job, layer) if not names or b.name in names]
    return [o for b in blocks for o in (b.forward if way == "forward" else b.backward)]


def flops(found: Iterable[Op]) -> float:
    """Of products."""
    return sum(2.0 * o.m * o.n * o.k * o.groups * o.batch for o in found if isinstance(o, Product))


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


def same(one: Cost, other: Cost) -> bool:
    return all(getattr(one, f.name) == pytest.approx(getattr(other, f.name), rel=1e-12) for f in fields(Cost))


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
    sums = flops(o for o in ops(one, "backward") if isinstance(o, Product) and o.sums)
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
    names = [b.name for b in layer_blocks(whole, LAST) if b.name not in every_rank]
    for way in ("forward", "backward"):
        assert tp * flops(ops(cut, way, names=names)) == flops(ops(whole, way, names=names))
        for a, b in zip(attends(whole, way), attends(cut, way), strict=True):
            assert tp * b.heads == a.heads and tp * b.kv_heads == a.kv_heads


def test_fewer_key_heads_than_ranks_are_copied() -> None:
    cut = job(SINGLE, parallel=ParallelPlan(tp=8))
    assert attends(cut, "forward")[0].kv_heads == 1
    qkv = next(o for o in ops(cut, "forward", names=["qkv"]) if isinstance(o, Product))
    assert qkv.n == 4 * 128 + 2 * 128


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 1), (4, 1), (8, 1), (2, 4), (1, 8)])
def test_experts_have_the_same_work_wherever_they_are(ep: int, expert_tp: int) -> None:
    one, spread = job(SPARSE, gpus=1), job(SPARSE, parallel=ParallelPlan(ep=ep, expert_tp=expert_tp))
    names = ["moe_up", "moe_down"]
    assert flops(ops(spread, "forward", names=names)) == flops(ops(one, "forward", names=names))
    groups = {o.groups for o in ops(spread, "forward", names=names) if isinstance(o, Product)}
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
    head = [o for b in head_blocks(one) for o in b.forward]
    assert flops(head) == 2.0 * one.rank_tokens * GROUPED.hidden * GROUPED.vocab
    assert flops(embedding_block(one).forward) == 0


# ---- attention


def attends(job: Job, way: str) -> list[Attend]:
    return [o for o in ops(job, way) if isinstance(o, Attend)]


def attention(job: Job, way: str = "forward", layer: int = LAST) -> Cost:
    return Pricer(job, LAWS).cost(o for o in ops(job, way, layer) if isinstance(o, Attend))


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
    talks = [o for o in ops(cut, "forward") if isinstance(o, Talk)]
    keys_and_values = 2 * 16384 * 8 * (128 + 128) * 2  # samples, tokens, heads, widths, bytes
    assert [(t.op, t.over, t.nbytes) for t in talks] == [("all_gather", "cp", keys_and_values)]


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


def sent(found: Iterable[Op], ranks: int) -> float:
    """Bytes a rank sends, in rings: an all-reduce is a scatter and a gather."""
    each = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return sum(each[o.op] * o.nbytes * (ranks - 1) / ranks for o in found if isinstance(o, Talk) and o.over == "tp")


@pytest.mark.parametrize("name", ["gelu", "grouped"])
def test_sequence_parallelism_sends_as_much_forward(name: str) -> None:
    """A gather and a scatter are an all-reduce; backward the input is gathered once more."""
    plain, split = (job(MODELS[name], parallel=ParallelPlan(tp=4, sequence_parallel=s)) for s in (False, True))
    hidden = plain.rank_tokens * MODELS[name].hidden * 2
    assert sent(ops(plain, "forward"), 4) == sent(ops(split, "forward"), 4) == 2 * 2 * hidden * 3 / 4
    assert sent(ops(split, "backward"), 4) == 1.5 * sent(ops(plain, "backward"), 4)


def test_one_rank_sends_nothing() -> None:
    for model in MODELS.values():
        blocks = [*layer_blocks(job(model, gpus=1), LAST), *head_blocks(job(model)), embedding_block(job(model))]
        assert not [o for b in blocks for o in (*b.forward, *b.backward) if isinstance(o, Talk)]


def test_tokens_go_to_their_experts_and_back() -> None:
    one = job(SPARSE, parallel=ParallelPlan(ep=8))
    talks = [o for way in ("forward", "backward") for o in ops(one, way) if isinstance(o, Talk)]
    assert {(t.op, t.over, t.nbytes) for t in talks} == {("all_to_all", "ep", one.rank_tokens * 2 * 4096 * 2.0)}
    assert len(talks) == 4


@pytest.mark.parametrize("tokens", [256, 8192])
def test_beside_a_product_a_transfer_costs_what_is_not_hidden(tokens: int) -> None:
    """As a whole: what is longer than the product, and the multiprocessors it holds meanwhile. Cut up by ranks: all but
    the first part hides."""
    beside = Product(tokens, 4096, 14336, "bf16", sums=True, along=False)
    talk = Talk("all_reduce", 64e6, Axis.TP, beside, whole=True)
    split = ParallelPlan(tp=8)
    apart = job(GROUPED, parallel=split, software={"async_backward": False}, overlap=NONE)
    whole, cut = job(GROUPED, parallel=split, overlap=NONE), job(GROUPED, parallel=split, overlap=TENSOR)
    alone, by = Pricer(apart, LAWS).one(talk).tp, Pricer(apart, LAWS).one(beside).product
    assert alone == Pricer(apart, LAWS).talk_seconds("all_reduce", 64e6, Axis.TP)
    lost = held(apart.platform.gpu) * min(alone, by)
    assert Pricer(whole, LAWS).one(talk).tp == pytest.approx(max(0.0, alone - by) + lost)
    assert Pricer(cut, LAWS).one(talk).tp == pytest.approx(max(alone / 8, alone - by * 7 / 8))
    assert Pricer(cut, LAWS).one(talk).tp < alone and Pricer(whole, LAWS).one(talk).tp < alone
    assert 0 < held(apart.platform.gpu) < 0.5
    assert Pricer(whole, LAWS).one(talk._replace(whole=False)).tp == alone


# ---- recomputation


@pytest.mark.parametrize("name", MODELS)
def test_full_recomputation_is_one_more_forward_pass(name: str) -> None:
    again, half = job(MODELS[name], recompute=Recompute("full")), Recompute("full", share=0.5)
    none = layer_passes(job(MODELS[name]), Pricer(job(MODELS[name]), LAWS), LAST)
    found = layer_passes(again, Pricer(again, LAWS), LAST)
    assert same(found.again, found.forward) and same(none.again, Cost())
    assert same(found.forward, none.forward) and same(found.backward, none.backward)
    every_second = replace(again, recompute=half)
    assert same(layer_passes(every_second, Pricer(every_second, LAWS), LAST).again, found.forward * 0.5)


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
    pricer = Pricer(one, LAWS)
    expected = pricer.cost(ops(one, "forward", names=BLOCKS[module] | {"none of these"}))
    assert same(layer_passes(one, pricer, LAST).again, expected)


def test_recomputation_by_op_repeats_every_second_product() -> None:
    one = job(GROUPED, recompute=Recompute("selective", ("op",)))
    pricer = Pricer(one, LAWS)
    assert layer_passes(one, pricer, LAST).again.flops == flops(ops(one, "forward")) / 2


def test_modules_have_one_list() -> None:
    assert set(KNOWN_MODULES) == set(MODULES) == {*BLOCKS, "op"}


def test_chips_know_every_kind_of_stream() -> None:
    """None falls back on the share of others."""
    kinds = set()
    for model in MODELS.values():
        for changes in ({}, {"dropout": True, "attention": "unfused"}, {"fused_norms": False, "fused_loss": False}):
            one = job(model, software=changes, precision="fp8")
            blocks = [*layer_blocks(one, LAST), *head_blocks(one), embedding_block(one)]
            kinds |= {o.kind for b in blocks for o in (*b.forward, *b.backward) if isinstance(o, Stream)}
    assert {"norm", "softmax", "dropout", "cast", "permute", "loss", "embedding"} <= kinds
    assert kinds <= Pricer(job(GPT), LAWS).chip.parameters.stream.keys()


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
        for block in layer_blocks(one, LAST):
            assert all(min(o.m, o.n, o.k) >= 1 for o in block.forward if isinstance(o, Product))


def test_blocks_leave_out_what_there_is_none_of() -> None:
    product = Product(1, 1, 1, "bf16")
    assert Block.of("x", [None, product], [None]) == Block("x", (product,), ())
