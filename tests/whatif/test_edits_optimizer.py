"""Optimizers edited against optimizers captured: the same ops, host ops and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from presage.capture import capture
from presage.graph.check import faults
from presage.graph.graph import Graph, Op
from presage.memory.step_memory import memory_profile
from presage.whatif.edits import EDITS, NotApplicable, cuda_graph, foreach_adam, fused_adam
from presage.whatif.edits.optimizer import capturable
from presage.whatif.edits.updating.updates import read

FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "capturable loop": {"capturable": True, "foreach": False},
}
ADAM = ({}, {"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.1, "maximize": True})
SGD = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
)
RMS = ({}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1})
KINDS: list[tuple[str, dict[str, Any]]] = [
    *(("Adam", o) for o in ADAM),
    ("AdamW", {}),
    *(("SGD", o) for o in SGD),
    *(("Adagrad", o) for o in ({}, {"weight_decay": 0.1})),
    *(("RMSprop", o) for o in RMS),
]


def small(
    make: Callable[[nn.Module], Any], device: str, scaler: bool = False, mixed: bool = False
) -> Callable[[], None]:
    """A step of a small model with the optimizers that `make` makes."""
    m = nn.Sequential(nn.Linear(24, 96, device=device), nn.ReLU(), nn.Linear(96, 24, device=device))
    m[2].to(torch.bfloat16 if mixed else torch.float32)
    made = make(m)
    optimizers = made if isinstance(made, list) else [made]
    x = torch.randn(32, 24, device=device)
    scale = torch.amp.GradScaler("cuda") if scaler else None

    def step() -> None:
        for o in optimizers:
            o.zero_grad()
        loss = m[2](m[1](m[0](x)).to(m[2].weight.dtype)).float().pow(2).mean()
        (scale.scale(loss) if scale else loss).backward()
        if scale:
            scale.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        for o in optimizers:
            scale.step(o) if scale else o.step()
        if scale:
            scale.update()

    return step


def captured(make: Callable[[nn.Module], Any], **options: bool) -> Graph:
    return capture(lambda device: small(make, device, **options), {}, source="small")


def of(kind: str, options: dict[str, Any], form: str) -> Graph:
    return _of(kind, tuple(options.items()), form)


@cache
def _of(kind: str, options: tuple[tuple[str, Any], ...], form: str) -> Graph:
    chosen = dict(options) | FORMS[form]
    return captured(lambda m: getattr(torch.optim, kind)(m.parameters(), lr=1e-3, **chosen))


def told(graph: Graph, op: Op) -> tuple[Any, ...]:
    tensors = tuple((t.shape, t.strides, t.dtype) for t in (*graph.inputs_of(op), *graph.outputs_of(op)))
    return op.name, op.overload, op.names, op.within, op.kernels, op.phase, op.thread, op.line, len(op.writes), tensors


def assert_same(edited: Graph, wanted: Graph, memory: float = 0.0) -> None:
    assert not list(faults(edited))
    assert Counter(told(edited, op) for op in edited.ops) == Counter(told(wanted, op) for op in wanted.ops)
    ours, theirs = memory_profile(edited).peak_allocated, memory_profile(wanted).peak_allocated
    assert abs(ours / theirs - 1) <= memory


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_foreach_is_what_foreach_runs(kind: str, options: dict[str, Any]) -> None:
    assert_same(foreach_adam(of(kind, options, "loop")), of(kind, options, "foreach"))


@pytest.mark.parametrize("form", ["loop", "foreach"])
@pytest.mark.parametrize(("kind", "options"), [k for k in KINDS if k[0] != "RMSprop"])
def test_fused_is_what_fused_runs(kind: str, options: dict[str, Any], form: str) -> None:
    assert_same(fused_adam(of(kind, options, form)), of(kind, options, "fused"))


@pytest.mark.parametrize("options", ADAM)
def test_capturable_is_what_capturable_runs(options: dict[str, Any]) -> None:
    """Lists of step sizes on the GPU are not taken at once: one division for each parameter, twice."""
    wanted = of("Adam", options, "capturable")
    assert sum(op.within == ("aten::_foreach_div_",) for op in wanted.ops) == 2 * 4
    assert_same(capturable(of("Adam", options, "foreach")), wanted, memory=1e-3)
    assert_same(capturable(of("Adam", options, "loop")), of("Adam", options, "capturable loop"), memory=1e-3)


def test_capturable_goes_on_as_foreach_and_fused() -> None:
    assert_same(foreach_adam(of("Adam", {}, "capturable loop")), of("Adam", {}, "capturable"), memory=1e-3)
    assert_same(fused_adam(of("Adam", {}, "capturable")), of("Adam", {}, "fused"))
    assert_same(foreach_adam(of("RMSprop", {}, "capturable loop")), of("RMSprop", {}, "capturable"))


def test_what_is_capturable_or_needs_not_be_stays() -> None:
    for graph in (of("Adam", {}, "fused"), of("Adam", {}, "capturable"), of("SGD", {}, "foreach")):
        assert capturable(graph) is graph


def test_a_cuda_graph_holds_a_capturable_adam() -> None:
    plain = of("Adam", {}, "foreach")
    assert sum(op.kernels for op in cuda_graph(plain).ops) == sum(op.kernels for op in of("Adam", {}, "capturable").ops)
    assert_same(fused_adam(cuda_graph(plain)), of("Adam", {}, "fused"))
    assert all(op.replayed for op in fused_adam(cuda_graph(plain)).ops)


@pytest.mark.parametrize(("edit", "done"), [(fused_adam, "fused"), (foreach_adam, "foreach"), (foreach_adam, "fused")])
def test_nothing_is_done_twice(edit: Callable[[Graph], Graph], done: str) -> None:
    with pytest.raises(NotApplicable):
        edit(of("Adam", {}, done))
    with pytest.raises(NotApplicable):
        edit(edit(of("Adam", {}, "loop")))


def test_other_ops_stay_as_they_are() -> None:
    before = of("AdamW", {}, "loop")
    for edit in (fused_adam, foreach_adam):
        after = edit(before)
        ours, theirs = ([told(g, op) for op in g.ops if op.phase != "optimizer"] for g in (after, before))
        assert ours == theirs


def _decayed(m: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def test_groups_and_dtypes_stay_apart() -> None:
    by_group = {
        form: captured(lambda m, f=form: torch.optim.AdamW(_decayed(m), **FORMS[f])) for form in list(FORMS)[:3]
    }
    assert_same(foreach_adam(by_group["loop"]), by_group["foreach"])
    assert_same(fused_adam(by_group["foreach"]), by_group["fused"])
    mixed = {
        f: captured(lambda m, f=f: torch.optim.Adam(m.parameters(), **FORMS[f]), mixed=True) for f in list(FORMS)[:3]
    }
    assert sum(op.name == "aten::_fused_adam_" for op in mixed["fused"].ops) == 2
    assert_same(fused_adam(mixed["loop"]), mixed["fused"])
    assert_same(foreach_adam(mixed["loop"]), mixed["foreach"], memory=1e-3)


def test_two_optimizers_are_two() -> None:
    def two(m: nn.Module, fused: bool) -> list[Any]:
        return [
            torch.optim.SGD(m[0].parameters(), lr=0.1, fused=fused),
            torch.optim.Adam(m[2].parameters(), fused=fused),
        ]

    assert_same(fused_adam(captured(lambda m: two(m, False))), captured(lambda m: two(m, True)))


def test_a_scaler_no_longer_waits() -> None:
    """Clipping and unscaling stay; the fused op looks on the GPU whether gradients overflowed."""
    base = captured(lambda m: torch.optim.Adam(m.parameters(), foreach=True), scaler=True)
    wanted = captured(lambda m: torch.optim.Adam(m.parameters(), fused=True), scaler=True)
    assert any(op.sync for op in base.ops)
    edited = fused_adam(base)
    assert not any(op.sync for op in edited.ops)
    assert [op.name for op in edited.ops] == [op.name for op in wanted.ops]
    assert not list(faults(edited))


class Lamb(torch.optim.Optimizer):
    """Adam with a step for each tensor that goes with its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s["average"], s["square"] = torch.zeros_like(p), torch.zeros_like(p)
            s["average"].lerp_(p.grad, 0.1)
            s["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = s["average"] / s["square"].sqrt().add_(1e-6)
            p.add_(update * (p.norm() / update.norm()), alpha=-1e-3)


@pytest.mark.parametrize("make", [Lamb, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop])
def test_other_optimizers_are_left_alone(make: Callable[..., Any]) -> None:
    graph = captured(lambda m: make(m.parameters()))
    assert {u.algorithm for u in read(graph)} == {"unknown"}
    for edit in (fused_adam, foreach_adam):
        with pytest.raises(NotApplicable, match="another kind"):
            edit(graph)
    assert capturable(graph) is graph


def test_sparse_gradients_are_not_fused() -> None:
    def build(device: str) -> Callable[[], None]:
        table = nn.EmbeddingBag(50, 8, sparse=True, device=device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        index = torch.randint(0, 50, (16, 2), device=device)

        def step() -> None:
            optimizer.zero_grad()
            table(index).sum().backward()
            optimizer.step()

        return step

    graph = capture(build, {}, source="sparse")
    for edit in (fused_adam, foreach_adam):
        with pytest.raises(NotApplicable, match="sparse"):
            edit(graph)


def test_edits_have_a_rule() -> None:
    for name in ("fused_adam", "foreach_adam"):
        assert len(EDITS[name].rule) > 80


def _pictures(device: str, form: str) -> Callable[[], None]:
    """Convolutions whose weights have their channels last, some of them 1x1."""
    m = nn.Sequential(nn.Conv2d(3, 8, 3, device=device), nn.Conv2d(8, 8, 1, device=device))
    m.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, **FORMS[form])
    x = torch.randn(2, 3, 16, 16, device=device).to(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        m(x).sum().backward()
        optimizer.step()

    return step


def test_strides_of_single_elements_do_not_part_lists() -> None:
    """A 1x1 weight and its gradient may have other strides, which say nothing: one op takes all of them."""
    loop, foreach = (capture(lambda device, f=f: _pictures(device, f), {}, source="p") for f in ("loop", "foreach"))
    assert [op.name for op in foreach.ops if op.phase == "optimizer"] == ["aten::_foreach_add_"]
    assert_same(foreach_adam(loop), foreach)
