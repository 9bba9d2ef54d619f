"""Fusing: torch.compile and fused chains as edits of a graph."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from presage.capture import capture
from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call, Shape
from presage.costs.families.fused import fused_parts
from presage.costs.host_constants import COMPILED_GRAPH, COMPILED_KERNEL, COMPILED_US, is_compiled
from presage.costs.kernel_files import load
from presage.fusing.dataflow import Node, Piece, Value, reduction_splits, saved_values
from presage.fusing.grouping import group_pieces
from presage.fusing.inductor import compile_regions
from presage.fusing.rules import lower_for_compile
from presage.graph import work
from presage.graph.graph import Graph, faults
from presage.memory.step_memory import memory_profile
from presage.prediction.api import predict
from presage.whatif.edits import NotApplicable, compiled, cuda_graph, fused_chains


class Block(nn.Module):
    def __init__(self, d: int, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d, device=device)
        self.up, self.down = nn.Linear(d, 4 * d, device=device), nn.Linear(4 * d, d, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention written out."""

    def __init__(self, d: int, h: int, device: str, p: float) -> None:
        super().__init__()
        self.h, self.p = h, p
        self.n1, self.n2 = nn.LayerNorm(d, device=device), nn.LayerNorm(d, device=device)
        self.qkv, self.o = nn.Linear(d, 3 * d, device=device), nn.Linear(d, d, device=device)
        self.up, self.down = nn.Linear(d, 4 * d, device=device), nn.Linear(4 * d, d, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        x = x + F.dropout(self.o((F.dropout(a, self.p) @ v).transpose(1, 2).reshape(b, t, d)), self.p)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), self.p)


class Rms(nn.Module):
    """A norm of small ops, and an activation with its gate."""

    def __init__(self, d: int, device: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(d, device=device))
        self.gate, self.up = (nn.Linear(d, 2 * d, bias=False, device=device) for _ in range(2))
        self.down = nn.Linear(2 * d, d, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def stepper(model: nn.Module, loss_of, times: int = 1):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        opt.zero_grad(set_to_none=True)
        for _ in range(times):
            loss_of().backward()
        opt.step()

    return step


def blocks(device: str, batch: int = 256, d: int = 128, n: int = 2, times: int = 1):
    m = nn.Sequential(*(Block(d, device) for _ in range(n)), nn.Linear(d, 10, device=device))
    x, y = torch.randn(batch, d, device=device), torch.randint(0, 10, (batch,), device=device)
    return stepper(m, lambda: F.cross_entropy(m(x), y), times)


def attention(device: str, p: float = 0.0):
    fused_parts = [nn.Embedding(1000, 256, device=device), *(Attention(256, 4, device, p) for _ in range(2))]
    m = nn.Sequential(*fused_parts, nn.Linear(256, 1000, device=device))
    ids, y = torch.randint(0, 1000, (4, 256), device=device), torch.randint(0, 1000, (1024,), device=device)
    return stepper(m, lambda: F.cross_entropy(m(ids).view(-1, 1000), y))


def rms(device: str, n: int = 2):
    m = nn.Sequential(*(Rms(256, device) for _ in range(n)))
    x, y = torch.randn(4096, 256, device=device), torch.randn(4096, 256, device=device)
    return stepper(m, lambda: F.mse_loss(m(x), y))


def conv(device: str):
    sizes = [(3, 16), (16, 16), (16, 16)]
    layers = [
        (nn.Conv2d(a, b, 3, padding=1, device=device), nn.BatchNorm2d(b, device=device), nn.ReLU()) for a, b in sizes
    ]
    fused_parts = [part for layer in layers for part in layer]
    m = nn.Sequential(*fused_parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10, device=device))
    x, y = torch.randn(8, 3, 16, 16, device=device), torch.randint(0, 10, (8,), device=device)
    return stepper(m, lambda: F.cross_entropy(m(x), y))


class ByHand(nn.Module):
    """Layer norm and GELU written out, or PyTorch's own."""

    def __init__(self, d: int, own: bool, device: str) -> None:
        super().__init__()
        self.own, self.linear = own, nn.Linear(d, d, device=device)
        self.w, self.b = (nn.Parameter(torch.ones(d, device=device)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own:
            return x + F.gelu(self.linear(F.layer_norm(x, x.shape[-1:], self.w, self.b)), approximate="tanh")
        m = x.mean(-1, keepdim=True)
        v = (x - m).pow(2).mean(-1, keepdim=True)
        y = self.linear((x - m) * torch.rsqrt(v + 1e-5) * self.w + self.b)
        return x + 0.5 * y * (1 + torch.tanh(0.79788 * (y + 0.044715 * y * y * y)))


def by_hand(device: str, own: bool = False):
    m = nn.Sequential(*(ByHand(512, own, device) for _ in range(3)))
    x, y = torch.randn(8192, 512, device=device), torch.randn(8192, 512, device=device)
    return stepper(m, lambda: F.mse_loss(m(x), y))


def vocabulary(device: str, words: int = 3001, amp: bool = True):
    """Scores of words, after attention in float32."""
    m = nn.ModuleList([nn.Linear(512, 512, device=device), nn.Linear(512, words, device=device)])
    x, y = torch.randn(4096, 512, device=device), torch.randint(0, words, (4096,), device=device)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            h = m[0](x)
            with torch.autocast("cuda", enabled=False):
                q = h.float().view(16, 256, 512)
                a = F.dropout(torch.softmax(torch.bmm(q, q.transpose(1, 2)), -1), 0.1)
                h = torch.bmm(a, q).reshape(4096, 512)
            return F.cross_entropy(m[1](h), y)

    return stepper(m, loss)


def pooled(device: str):
    m = nn.Sequential(
        nn.Conv2d(3, 16, 3, device=device), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3, device=device)
    )
    x = torch.randn(4, 3, 32, 32, device=device)
    return stepper(m, lambda: m(x).square().mean())


def products(device: str):
    """Nothing but products."""
    m = nn.Linear(64, 64, bias=False, device=device)
    x, gradient = (torch.randn(64, 64, device=device) for _ in range(2))
    return lambda: m(x).backward(gradient)


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    made = {"blocks": blocks, "attention": attention, "rms": rms, "conv": conv, "products": products}
    made |= {"by_hand": by_hand, "own": lambda device: by_hand(device, True), "pooled": pooled}
    made |= {"words": vocabulary, "even": lambda device: vocabulary(device, 3000)}
    made |= {"float32": lambda device: vocabulary(device, 3001, False)}
    made |= {"dropout": lambda device: attention(device, 0.1), "twice": lambda device: blocks(device, times=2)}
    return {name: capture(build, {}, source=name) for name, build in made.items()}


ALL = ("blocks", "attention", "rms", "conv", "dropout", "twice", "by_hand", "pooled")


def kinds(graph: Graph, phase: str) -> Counter[str]:
    names = [op.name for op in graph.ops if op.kernels and op.phase == phase]
    return Counter(n.removeprefix("triton::") if n.startswith("triton::") else "extern" for n in names)


def products_of(graph: Graph) -> Counter[tuple[object, ...]]:
    found = [op for op in graph.ops if work.family(op.name) in ("matrix multiply", "convolution") and op.kernels]
    return Counter((op.name, *(t.shape for t in graph.inputs_of(op))) for op in found)


# ---- compile


def test_forward_kernels_are_those_of_inductor(graphs):
    """What Inductor (PyTorch 2.13, for an H200) makes of the same two steps, forward: 4 reductions and 3 elementwise
    kernels beside 5 products; and 8 and 11 beside 13."""
    assert kinds(compiled(graphs["blocks"]), "forward") == {"extern": 5, "reduction": 4, "pointwise": 3}
    assert kinds(compiled(graphs["attention"]), "forward") == {"extern": 13, "reduction": 8, "pointwise": 11}


def test_backward_kernels_are_nearly_those_of_inductor(graphs):
    """There it makes 17 reductions, 2 elementwise kernels, 10 products; and 36, 7 (the last zeroes a table), 26."""
    assert kinds(compiled(graphs["blocks"]), "backward") == {"extern": 10, "reduction": 18, "pointwise": 2}
    assert kinds(compiled(graphs["attention"]), "backward") == {"extern": 26, "reduction": 37, "pointwise": 7}


@pytest.mark.parametrize("name", ALL)
def test_compiled_graphs_are_valid_and_do_the_same_products(graphs, name):
    before = graphs[name]
    after = compiled(before)
    assert not list(faults(after))
    assert products_of(after) == products_of(before)
    assert [op for op in after.ops if op.phase == "optimizer" and op.kernels] != []
    names = [[op.name for op in g.ops if op.phase == "optimizer"] for g in (before, after)]
    assert names[0] == names[1]
    moved = [sum(work.bytes_moved(g, op).total for op in g.ops) for g in (before, after)]
    assert moved[1] < moved[0]


@pytest.mark.parametrize("name", ALL)
def test_compiled_steps_need_no_more_memory(graphs, name):
    assert memory_profile(compiled(graphs[name])).peak_allocated <= 1.02 * memory_profile(graphs[name]).peak_allocated


def test_what_is_compiled_is_not_compiled_again(graphs):
    with pytest.raises(NotApplicable):
        compiled(compiled(graphs["blocks"]))
    with pytest.raises(NotApplicable):
        compiled(graphs["products"])


def test_gradients_are_taken_after_the_compiled_backward(graphs):
    ops = compiled(graphs["blocks"]).ops
    last = max(i for i, op in enumerate(ops) if is_compiled(op))
    taken = [i for i, op in enumerate(ops) if op.within and op.within[0].endswith("AccumulateGrad")]
    assert taken and min(taken) > last
    assert all((op.thread == "autograd") == (op.phase == "backward") for op in ops if is_compiled(op))


def test_two_passes_are_four_compiled_graphs(graphs):
    assert len(set(compile_regions(graphs["twice"])) - {-1}) == 4
    ops = compiled(graphs["twice"]).ops
    turns = [
        op.phase
        for a, op in zip([None, *ops], ops, strict=False)
        if is_compiled(op) and (a is None or a.phase != op.phase)
    ]
    assert turns == ["forward", "backward", "forward", "backward"]


def test_compiled_steps_compose(graphs):
    both = cuda_graph(compiled(graphs["dropout"]))
    assert not list(faults(both))
    assert predict(both, draws=5).step.p50 < predict(compiled(graphs["dropout"]), draws=5).step.p50
    assert not list(faults(compiled(fused_chains(graphs["rms"]))))


def test_host_time_of_compiled_code(graphs):
    after = predict(compiled(graphs["rms"]), draws=5)
    kernels = sum(op.name.startswith("triton::") for op in compiled(graphs["rms"]).ops)
    assert after.host > 1e-6 * (kernels * COMPILED_US[COMPILED_KERNEL] + 2 * COMPILED_US[COMPILED_GRAPH])
    assert after.gpu_active < predict(graphs["rms"], draws=5).gpu_active


# ---- ops that run as they are


def matrices(graph: Graph, phase: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    found = [op for op in graph.ops if op.phase == phase and op.name in ("aten::mm", "aten::bmm", "aten::addmm")]
    pairs = [graph.inputs_of(op)[-2:] for op in found]
    return [(a.dtype, a.shape, b.shape) for a, b in pairs]


def test_uneven_products_are_padded(graphs):
    """A vocabulary of 3001 words becomes one of 3008, in all three products; the parameter's cast writes it so."""
    after = compiled(graphs["words"])
    assert not list(faults(after))
    sizes = {n for phase in ("forward", "backward") for _, a, b in matrices(after, phase) for n in (*a, *b)}
    assert 3008 in sizes and 3001 not in sizes
    assert matrices(after, "forward")[-1] == ("bfloat16", (4096, 512), (512, 3008))
    assert not any("copy_" in op.name for op in after.ops if is_compiled(op))
    assert predict(after, draws=5).gpu_active < 1.1 * predict(compiled(graphs["even"]), draws=5).gpu_active


def test_even_and_small_products_are_left_alone(graphs):
    assert {3000} == {n for _, a, b in matrices(compiled(graphs["even"]), "forward") for n in (*a, *b) if n > 2999} - {
        4096
    }
    few = capture(lambda device: vocabulary(device, 10), {}, source="few")
    assert 10 in {n for _, _, b in matrices(compiled(few), "forward") for n in b}  # arithmetic is little


def test_backward_products_follow_autocast(graphs):
    """Attention in float32: its backward pass runs in bfloat16 where the step is under autocast."""
    eager, after = graphs["words"], compiled(graphs["words"])
    assert [t for t, a, _ in matrices(eager, "backward") if len(a) == 3] == ["float32"] * 4
    assert [t for t, a, _ in matrices(after, "backward") if len(a) == 3] == ["bfloat16"] * 4
    assert [t for t, a, _ in matrices(after, "forward") if len(a) == 3] == ["float32"] * 2
    assert {t for t, _, _ in matrices(compiled(graphs["float32"]), "backward")} == {"float32"}


def test_dropout_is_part_of_the_softmax_before_it(graphs):
    drawn = [op for op in compiled(graphs["words"]).ops if op.name.startswith("triton::") and op.inputs[6]]
    assert [op.name for op in drawn] == ["triton::reduction"]


def test_max_pooling_keeps_bytes(graphs):
    after = compiled(graphs["pooled"])
    (back,) = (op for op in after.ops if op.name == "aten::max_pool2d_with_indices_backward")
    assert [t.dtype for t in after.inputs_of(back)][-1] == "int8"
    assert memory_profile(after).peak_allocated < memory_profile(graphs["pooled"]).peak_allocated


# ---- what is kept


def test_an_activation_is_computed_again_and_products_are_kept(graphs):
    """Kept of a block: results of products that an activation needs, what products read, statistics; not the
    activation's own inputs twice."""
    graph = graphs["blocks"]
    flow = lower_for_compile(graph, compile_regions(graph)).flow
    saved = saved_values(flow, [0], 1)
    producers = flow.producers()
    ops = {graph.ops[flow.nodes[producers[v]].op].name for v in saved}
    assert {"aten::addmm", "aten::gelu", "aten::native_layer_norm"} <= ops  # GELU's result is read by a product
    read = {v for n, k in zip(flow.nodes, flow.region, strict=True) if k == 1 for v in n.reads if v in producers}
    bytes_read = sum(flow.values[v].nbytes for v in read if flow.region[producers[v]] == 0)
    assert sum(flow.values[v].nbytes for v in saved) <= bytes_read
    for node, k in zip(flow.nodes, flow.region, strict=True):
        if k == 1 and not node.fuses:
            assert all(v in saved for v in node.reads if v in producers and flow.region[producers[v]] == 0)


def test_random_numbers_are_drawn_once(graphs):
    after = compiled(graphs["dropout"])
    drawn = [op for op in after.ops if op.name.startswith("triton::") and op.inputs[6]]
    assert drawn and {op.phase for op in drawn} == {"forward"}


# ---- grouping


@pytest.mark.parametrize(
    ("rows", "columns", "down", "parts"),
    [
        (1024, 16384, True, 128),
        (1024, 4096, True, 32),
        (512, 256, True, 2),
        (4096, 1024, False, 1),
        (256, 8192, False, 1),
    ],
)
def test_reductions_are_split_as_inductor_splits_them(rows, columns, down, parts):
    assert reduction_splits(rows, columns, down) == parts


def test_a_sum_of_all_is_split():
    assert 400 <= reduction_splits(1, 1 << 24, False) <= 600  # Inductor: 512


@pytest.mark.parametrize("seed", range(20))
def test_groups_never_wait_for_each_other(seed):
    rng = random.Random(seed)
    values = [Value(64, 4) for _ in range(200)]
    found = []
    for i in range(80):
        kind = rng.choice(["pointwise", "pointwise", "pointwise", "reduction", "extern"])
        rows, columns = (8, 8) if kind == "reduction" else (rng.choice([64, 8]), 1)
        reads = tuple({rng.randrange(max(1, 100 + i)) for _ in range(rng.randint(1, 3))})
        node = Node(kind, i, reads, (100 + i,), rows, columns)
        found.append(Piece(node, 0, reads, (100 + i,), (i,)))
    together = group_pieces(found, values)
    of = {m: g for g, group in enumerate(together) for m in group.members}
    assert sorted(of) == list(range(80))
    waits = {
        g: {of[v - 100] for m in group.members for v in found[m].reads if v >= 100} - {g}
        for g, group in enumerate(together)
    }
    done: set[int] = set()
    while len(done) < len(together):
        ready = {g for g in waits if g not in done and waits[g] <= done}
        assert ready
        done |= ready
    for group in together:
        if any(n.kind == "extern" for n in group.nodes):
            assert len(group.members) == 1
        assert len({n.elements for n in group.nodes} - {8}) <= 1


# ---- chains


def test_a_norm_of_small_ops_becomes_one(graphs):
    before, after = graphs["rms"], fused_chains(graphs["rms"])
    assert not list(faults(after))
    forward = [op for op in after.ops if op.phase == "forward" and op.kernels]
    small = [op.name for op in forward if work.family(op.name) == "elementwise"]
    assert small == ["aten::add"] * 2  # the residuals
    assert sum(op.name == "fused::reduction" for op in forward) == 2
    assert products_of(after) == products_of(before)
    assert memory_profile(after).peak_allocated < memory_profile(before).peak_allocated
    a, b = predict(before, draws=5), predict(after, draws=5)
    assert b.gpu_active < a.gpu_active and b.host < a.host


def test_chains_are_what_pytorch_has_kernels_for(graphs):
    """Layer norm and GELU written out: as many kernels, as much time and memory, as with PyTorch's own (whose norm's
    backward op is two kernels where its input has a gradient: in two of three layers)."""
    after, own = fused_chains(graphs["by_hand"]), graphs["own"]
    assert not list(faults(after))
    for phase, more in (("forward", 0), ("backward", 2)):
        counts = [sum(op.kernels for op in g.ops if op.phase == phase) for g in (after, own)]
        assert counts[0] == counts[1] + more
    a, b = predict(after, draws=5), predict(own, draws=5)
    assert a.gpu_active == pytest.approx(b.gpu_active, rel=0.1)
    assert a.peak_memory == pytest.approx(b.peak_memory, rel=0.01)
    assert predict(graphs["by_hand"], draws=5).gpu_active > 1.5 * a.gpu_active


def test_residuals_join_dropout_only(graphs):
    after = fused_chains(graphs["dropout"])
    forward = [op for op in after.ops if op.phase == "forward" and op.kernels]
    assert sum(op.name == "fused::pointwise" for op in forward) == 4 and "aten::add" not in {op.name for op in forward}


@pytest.mark.parametrize("name", ["attention", "dropout", "conv", "rms", "twice", "by_hand", "words", "pooled"])
def test_chains_leave_other_ops_alone(graphs, name):
    before = graphs[name]
    try:
        after = fused_chains(before)
    except NotApplicable:
        return
    assert not list(faults(after))
    kept_ops = Counter(op.name for op in after.ops if op.kernels and work.family(op.name) != "fused")
    assert not kept_ops - Counter(op.name for op in before.ops if op.kernels)
    assert products_of(after) == products_of(before)
    assert memory_profile(after).peak_allocated <= 1.02 * memory_profile(before).peak_allocated


def test_chains_are_fused_once(graphs):
    with pytest.raises(NotApplicable):
        fused_chains(graphs["products"])
    once = fused_chains(graphs["rms"])
    try:
        twice = fused_chains(once)
    except NotApplicable:
        return
    assert sum(op.kernels for op in twice.ops) <= sum(op.kernels for op in once.ops)


# ---- the cost of a fused kernel


def fused(read: float, written: float, columns: int = 1, down: bool = False, random: int = 0, exp: int = 0) -> Call:
    inputs = ((Shape((1000, 1000), (1000, 1), "float32"),), read, written, 1000, columns, down, random, 0, exp, False)
    return Call("triton::reduction" if columns > 1 else "triton::pointwise", inputs)


def seconds(*calls: Call) -> list[float]:
    return [t.cold for t in call_times(load("h200"), [fused_parts(c)[0] for c in calls])]


def test_fused_kernels_take_longer_the_more_they_move():
    small, large, huge = seconds(fused(4e6, 4e6), fused(64e6, 64e6), fused(512e6, 512e6))
    assert small < large < huge
    assert 3.5e12 < 1024e6 / huge < 4.8e12  # bytes a second of an H200


def test_random_numbers_and_columns_take_time():
    plain, drawn, down, long = seconds(
        fused(32e6, 32e6),
        fused(32e6, 32e6, random=8 << 20),
        fused(64e6, 1e3, 128, True),
        fused(64e6, 64e6, 32000, exp=64 << 20),
    )
    assert drawn > 1.5 * plain and down > plain and long > 3 * plain
