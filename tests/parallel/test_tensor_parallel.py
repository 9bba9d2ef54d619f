"""Tensor parallelism on captured graphs, beside models that were cut by hand and PyTorch's own tensor parallelism."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="capturing needs torch: pip install 'presage[torch]'")

from part_models import BATCH, HEADS, LAYERS, LENGTH, WIDTH, Model, builder  # noqa: E402
from presage.capture import capture, load, load_cases  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph import work as flops  # noqa: E402
from presage.graph.graph import (  # noqa: E402
    Graph,
    Op,
    Ref,
    check,
)
from presage.graph.work import collective, collective_bytes  # noqa: E402
from presage.memory.step_memory import memory_profile  # noqa: E402
from presage.parallel.tensor import tensor_parallel  # noqa: E402
from quickest import quickest  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CUT = ("attention.qkv", "attention.out", "feed.up", "feed.down")


@cache
def captured(kind: str, **arguments) -> Graph:
    return capture(builder(kind, **arguments))


def compute(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if not collective(op)]


def all_reduces(graph: Graph) -> dict[str, list[int]]:
    """Bytes of each by phase."""
    found = defaultdict(list)
    for op in graph.ops:
        if collective(op):
            found[op.phase].append(collective_bytes(graph, op))
    return dict(found)


def seen(graph: Graph, op: Op) -> tuple:
    """All of an op but which memory its tensors are in."""

    def value(a):
        if isinstance(a, Ref):
            t = graph.tensors[a.id]
            return t.shape, t.strides if t.elements > 1 else (), t.offset, t.dtype
        return tuple(map(value, a)) if isinstance(a, list) else a

    outputs = [value(Ref(i)) for i in op.outputs]
    inputs = [value(a) for a in op.inputs]
    return op.name, op.phase, op.module, op.kernels, op.within, inputs, outputs


def memory(graph: Graph) -> list[tuple]:
    """Memory of the step itself, without what the softmax of a shared vocabulary passes around."""
    named = {t.storage for op in graph.ops if collective(op) for t in graph.inputs_of(op)}
    used = {t.storage for op in compute(graph) for t in (*graph.inputs_of(op), *graph.outputs_of(op))}
    return sorted((s.role, s.name, s.nbytes) for s in graph.storages if s.id in used or s.id not in named)


def same_step(cut: Graph, by_hand: Graph) -> None:
    assert [seen(cut, op) for op in compute(cut)] == [seen(by_hand, op) for op in by_hand.ops]
    assert memory(cut) == memory(by_hand)


# ---- the step of a rank is that of a model cut by hand, op by op, tensor by tensor

STEPS = {
    "gpt": {"kind": "gpt", "layout": "permuted"},
    "gpt, chunks": {"kind": "gpt", "layout": "chunk", "optimizer": "lists"},
    "gpt, by head": {"kind": "gpt", "layout": "by head", "amp": False},
    "gpt, no fused attention": {"kind": "gpt", "layout": "manual"},
    "gpt, recomputed, clipped": {"kind": "gpt", "recompute": True, "clip": True, "optimizer": "loop"},
    "bert": {"kind": "bert", "amp": False},
}
PAIRED = {
    "llama": {"kind": "llama"},
    "llama, bf16": {"kind": "llama", "amp": False, "dtype": torch.bfloat16, "optimizer": "lists"},
    "llama, norm of queries": {"kind": "llama", "layout": "query norm", "amp": False},
}


@pytest.mark.parametrize(("name", "ranks"), [*((n, 4) for n in STEPS), *((n, 2) for n in PAIRED)])
def test_equals_a_model_cut_by_hand(name, ranks):
    arguments = {**STEPS, **PAIRED}[name]
    cut = check(tensor_parallel(captured(**arguments), ranks))
    by_hand = captured(**arguments, parts=ranks)
    same_step(cut, by_hand)
    assert memory_profile(cut).peak_allocated == memory_profile(by_hand).peak_allocated


@pytest.mark.parametrize("tied", [False, True])
def test_shared_vocabulary_equals_one_cut_by_hand(tied):
    cut = check(tensor_parallel(captured("gpt", layout="permuted", tied=tied), 4, vocabulary=True))
    same_step(cut, captured("gpt", layout="permuted", tied=tied, parts=4, shared=True))
    rows = BATCH * LENGTH
    ordinary = tensor_parallel(captured("gpt", layout="permuted", tied=tied), 4)
    more = {p: Counter(b) - Counter(all_reduces(ordinary)[p]) for p, b in all_reduces(cut).items()}
    assert more == {
        "forward": Counter({rows * WIDTH * 4: 1, rows * 4: 3}),  # embeddings; highest, sum and right class of each row
        "backward": Counter({rows * WIDTH * 2: 1}),  # into the head
    }
    assert not cut.notes


def test_one_head_a_rank_keeps_copies_and_says_so():
    cut = tensor_parallel(captured("llama"), 4)
    by_hand = captured("llama", parts=4)
    assert any("copies in reshapes are kept" in note for note in cut.notes)
    assert len(compute(cut)) > len(by_hand.ops)
    assert sum(flops.flops(cut, op) for op in cut.ops) == sum(flops.flops(by_hand, op) for op in by_hand.ops)
    assert memory_profile(cut).peak_allocated == pytest.approx(memory_profile(by_hand).peak_allocated, rel=0.005)


# ---- what is cut, what is not, and what is sent


@pytest.mark.parametrize("ranks", [2, 8])
def test_work_of_the_cut_layers_is_shared_out_and_no_other(ranks):
    whole = captured("gpt", layout="permuted")
    cut = tensor_parallel(whole, ranks)
    for phase in ("forward", "backward"):
        before, after = (_work(g, phase) for g in (whole, cut))
        assert before.keys() == after.keys()
        for module, work in before.items():
            shared = module.endswith((*CUT, "attention"))  # 'attention' itself: the scores
            assert after[module] * (ranks if shared else 1) == work > 0, (phase, module)


def _work(graph: Graph, phase: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for op in graph.ops:
        if op.phase == phase:
            found[op.module] += flops.flops(graph, op)
    return +found


def test_memory_of_the_cut_layers_is_shared_out_and_no_other():
    whole = captured("gpt", layout="permuted")
    cut = tensor_parallel(whole, 4)
    for role in ("parameter", "gradient"):
        pairs = [(a, b) for a, b in zip(whole.storages, cut.storages, strict=True) if a.role == role]
        assert len(pairs) >= 28  # of gradients, both those of this step and those of the one before
        for a, b in pairs:
            shared = a.name.endswith(tuple(f"{m}.weight" for m in CUT)) or a.name.endswith(("qkv.bias", "up.bias"))
            assert b.nbytes * (4 if shared else 1) == a.nbytes, a
    held = Counter({role: sum(s.nbytes for s in cut.storages if s.role == role) for role in ("parameter", "optimizer")})
    weights = list(Model("gpt", 4).parameters())
    assert held["parameter"] == 4 * sum(p.numel() for p in weights)
    assert held["optimizer"] == 2 * held["parameter"] + 4 * len(weights)  # two averages, and a count of steps each


def test_heads_are_shared_out():
    cut = tensor_parallel(captured("gpt", layout="permuted"), 4)
    attentions = [cut.inputs_of(op)[0].shape for op in cut.ops if "_attention_" in op.name]
    assert attentions == [(BATCH, HEADS // 4, LENGTH, WIDTH // HEADS)] * 2 * LAYERS


@pytest.mark.parametrize(
    ("arguments", "forward", "backward"),
    [
        ({"kind": "gpt", "layout": "permuted"}, 2, 2),
        ({"kind": "gpt", "layout": "by head", "amp": False}, 4, 4),
        ({"kind": "llama"}, 2, 4),  # each of q, k and v casts its input's gradient to float32 before they are added
        ({"kind": "llama", "amp": False, "dtype": torch.bfloat16, "optimizer": "lists"}, 2, 2),
        ({"kind": "bert", "amp": False}, 4, 4),
    ],
)
def test_two_all_reduces_a_layer_each_way(arguments, forward, backward):
    cut = tensor_parallel(captured(**arguments), 2, group="row")
    rows = BATCH * LENGTH * WIDTH
    sent = all_reduces(cut)
    assert sent["forward"] == [rows * forward] * 2 * LAYERS
    assert sent["backward"] == [rows * backward] * 2 * LAYERS
    assert {(op.stream, op.group) for op in cut.ops if collective(op)} == {("row", "row")}


def test_an_all_reduce_stands_between_a_share_and_its_use():
    cut = tensor_parallel(captured("gpt", layout="permuted"), 2)
    for place, op in enumerate(cut.ops):
        if collective(op):
            made = cut.ops[place - 1]
            assert made.name in ("aten::mm", "aten::addmm")
            assert op.inputs == ([Ref(made.outputs[0])],) and op.writes == made.outputs


def test_gradients_of_small_norms_and_the_gradient_norm_are_summed():
    normed = all_reduces(tensor_parallel(captured("llama", layout="query norm", amp=False), 2))
    assert sorted(normed["backward"])[:LAYERS] == [WIDTH // HEADS * 4] * LAYERS
    clipped = tensor_parallel(captured("gpt", recompute=True, clip=True, optimizer="loop"), 2)
    total = [op for op in clipped.ops if collective(op) and collective_bytes(clipped, op) == 4]
    assert len(total) == 1


def test_recomputed_layers_send_again():
    cut = tensor_parallel(captured("gpt", recompute=True, clip=True, optimizer="loop"), 2)
    rows = BATCH * LENGTH * WIDTH * 2
    again = all_reduces(cut)["backward"].count(rows) - 2 * LAYERS
    assert again == LAYERS  # the attention's; recomputing ends before the block's last product


def test_one_rank_changes_nothing():
    whole = captured("gpt", layout="permuted")
    assert tensor_parallel(whole, 1) is whole
    with pytest.raises(PresageError, match="at least 1 rank"):
        tensor_parallel(whole, 0)


# ---- PyTorch's own tensor parallelism sends as often

KIND = {"gpt": STEPS["gpt"], "llama": PAIRED["llama"]}


def _sent_by_pytorch(model, plan, ranks: int) -> tuple[int, int]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
            if hasattr(block.attention, "heads"):
                block.attention.heads //= ranks
        with CommDebugMode() as sent:
            loss = model(torch.randint(100, (2, 16))).sum()
            forward = sent.get_total_counts()
            loss.backward()
        return forward, sent.get_total_counts() - forward
    finally:
        destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_sends_as_often_as_pytorch(kind):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    once = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    first = {"gpt": ("attention.qkv", "feed.up"), "llama": ("attention.[qkv]", "feed.gate", "feed.up")}[kind]
    last = {"gpt": ("attention.out", "feed.down"), "llama": ("attention.o", "feed.down")}[kind]
    plan = {"attention": once, "feed": once}
    plan |= dict.fromkeys(first, ColwiseParallel()) | dict.fromkeys(last, RowwiseParallel())
    sent = all_reduces(tensor_parallel(captured(**KIND[kind]), 2))
    assert (len(sent["forward"]), len(sent["backward"])) == _sent_by_pytorch(Model(kind), plan, 2)


# ---- models as people have them


def hugging_face(name: str, dtype=torch.float32, **config):
    """A model whose configuration lets heads and inner widths be those of one rank."""
    import transformers

    def build(device: str):
        head = {"T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
        made = getattr(transformers, f"{name}Config")(vocab_size=500, **config)
        with torch.device(device):
            model = getattr(transformers, name + head)(made).to(dtype)
        tokens = torch.randint(0, 500, (2, 32), device=device)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    return build


def decoder(ranks: int, kv: int) -> dict[str, int]:
    return {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8 // ranks, "num_key_value_heads": kv,
        "head_dim": 8, "intermediate_size": 128 // ranks,
    }  # fmt: skip


def t5(ranks: int) -> dict[str, int]:
    return {
        "d_model": 64, "d_kv": 8, "d_ff": 128 // ranks, "num_layers": 2, "num_heads": 8 // ranks,
        "decoder_start_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "whole", "part"),
    [
        ("Llama", decoder(1, 4), decoder(2, 2)),
        ("Gemma", decoder(1, 1), decoder(2, 1)),  # one head of keys and values: every rank has it
        pytest.param(
            "Mixtral",
            {**decoder(1, 4), "dtype": torch.bfloat16},
            {**decoder(2, 2), "dtype": torch.bfloat16},
            marks=pytest.mark.slow,
        ),
        ("T5", t5(1), t5(2)),  # biases by head, shared by layers; keys and values of the encoder
    ],
)
def test_hugging_face_models_equal_those_configured_as_a_part(name, whole, part):
    pytest.importorskip("transformers", reason="these models come from transformers")
    cut = check(tensor_parallel(capture(hugging_face(name, **whole)), 2))
    same_step(cut, capture(hugging_face(name, **part)))


@pytest.mark.parametrize(("name", "layers"), [("bert", 2), ("gpt2", 2), ("vit", 2)])
def test_other_hugging_face_models(name, layers):
    pytest.importorskip("transformers", reason="these models come from transformers")
    sys.path.insert(0, str(ROOT / "tests"))
    from small_models import MODELS

    cut = check(tensor_parallel(capture(MODELS[name]), 4))
    sent = all_reduces(cut)
    assert (len(sent["forward"]), len(sent["backward"])) == (2 * layers, 2 * layers)


def test_gpt_of_the_examples():
    whole = capture(load(f"{ROOT}/examples/gpt.py:build"), {"layers": 2})
    cut = check(tensor_parallel(whole, 8))
    assert all_reduces(cut) == {"forward": [8 * 1024 * 1024 * 2] * 4, "backward": [8 * 1024 * 1024 * 2] * 4}
    assert [n for n in cut.notes if n not in whole.notes] == [
        "tensor parallel: head left whole: _log_softmax needs it whole"
    ]


# ---- what cannot be cut


def test_heads_that_do_not_divide_leave_the_attention_whole():
    whole = captured("gpt", layout="permuted")
    cut = check(tensor_parallel(whole, 16))
    names = {
        a.name
        for a, b in zip(whole.storages, cut.storages, strict=True)
        if b.nbytes < a.nbytes and a.role == "parameter"
    }
    assert names and all(".feed." in n for n in names)
    assert any("attention.qkv" in n and "8 of [" in n and "among 16 ranks" in n for n in cut.notes)


def test_a_model_without_pairs_is_an_error(shared):
    cases = load_cases(shared / "h200" / "workloads.py")
    with pytest.raises(PresageError, match=r"no pair of linear layers .* body\.20 left whole: _log_softmax needs it"):
        tensor_parallel(capture(cases["resnet50_b32_fp32"]), 2)


def test_a_model_without_linear_layers_is_an_error():
    def build(device):
        model = torch.nn.Conv2d(3, 8, 3, device=device)
        x = torch.randn(2, 3, 8, 8, device=device)
        return lambda: model(x).sum().backward()

    with pytest.raises(PresageError, match="no products with a parameter"):
        tensor_parallel(capture(build), 2)


def test_an_op_without_a_rule_leaves_its_pair_whole_and_is_named():
    def build(device):
        first, act, last = torch.nn.Linear(64, 64), torch.nn.PReLU(64), torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(
            first, act, last, torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
        )
        model = model.to(device)
        x = torch.randn(8, 64, device=device)
        return lambda: model(x).square().mean().backward()

    cut = check(tensor_parallel(capture(build), 2))
    assert any("0 left whole: no rule says how to share out _prelu_kernel" in n for n in cut.notes)
    assert all_reduces(cut) and any(s.name == "3.weight" and s.nbytes == 64 * 64 * 4 for s in cut.storages)


# ---- speed


def test_two_thousand_ops_in_a_fifth_of_a_second():
    whole = capture(load(f"{ROOT}/examples/gpt.py:build"), {"layers": 15})
    assert len(whole.ops) > 2_000
    assert quickest(lambda: tensor_parallel(whole, 8)) < 0.3  # for a busy machine
