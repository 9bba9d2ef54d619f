"""Forms of optimizers as variants against optimizers constructed so: the same ops, host ops and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from presage.capture import Variant, capture
from presage.capture.variants import AS_WRITTEN
from presage.graph.graph import Graph, Op, faults
from presage.memory.step_memory import memory_profile

FUSED, FOREACH, CAPTURABLE = Variant(optimizer="fused"), Variant(optimizer="foreach"), Variant(capturable=True)
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


def captured(make: Callable[[nn.Module], Any], variant: Variant = AS_WRITTEN, **options: bool) -> Graph:
    return capture(lambda device: small(make, device, **options), {}, source="small", variant=variant)


def of(kind: str, options: dict[str, Any], form: str, variant: Variant = AS_WRITTEN) -> Graph:
    return _of(kind, tuple(options.items()), form, variant)


@cache
def _of(kind: str, options: tuple[tuple[str, Any], ...], form: str, variant: Variant) -> Graph:
    chosen = dict(options) | FORMS[form]
    return captured(lambda m: getattr(torch.optim, kind)(m.parameters(), lr=1e-3, **chosen), variant)


def described(graph: Graph, op: Op) -> tuple[Any, ...]:
    tensors = tuple((t.shape, t.strides, t.dtype) for t in (*graph.inputs_of(op), *graph.outputs_of(op)))
    return op.name, op.overload, op.names, op.within, op.kernels, op.phase, op.thread, op.line, len(op.writes), tensors


def assert_same(edited: Graph, wanted: Graph, memory: float = 0.0) -> None:
    assert not list(faults(edited))
    assert Counter(described(edited, op) for op in edited.ops) == Counter(described(wanted, op) for op in wanted.ops)
    ours, theirs = memory_profile(edited).peak_allocated, memory_profile(wanted).peak_allocated
    assert abs(ours / theirs - 1) <= memory


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_foreach_is_what_foreach_runs(kind: str, options: dict[str, Any]) -> None:
    assert_same(of(kind, options, "loop", FOREACH), of(kind, options, "foreach"))


@pytest.mark.parametrize("form", ["loop", "foreach"])
@pytest.mark.parametrize(("kind", "options"), [k for k in KINDS if k[0] != "RMSprop"])
def test_fused_is_what_fused_runs(kind: str, options: dict[str, Any], form: str) -> None:
    assert_same(of(kind, options, form, FUSED), of(kind, options, "fused"))


@pytest.mark.parametrize("options", [ADAM[0], *(pytest.param(o, marks=pytest.mark.slow) for o in ADAM[1:])])
def test_capturable_is_what_capturable_runs(options: dict[str, Any]) -> None:
    """Lists of step sizes on the GPU are not taken at once: one division for each parameter, twice."""
    wanted = of("Adam", options, "capturable")
    assert sum(op.within == ("aten::_foreach_div_",) for op in wanted.ops) == 2 * 4
    assert_same(of("Adam", options, "foreach", CAPTURABLE), wanted, memory=1e-3)
    assert_same(of("Adam", options, "loop", CAPTURABLE), of("Adam", options, "capturable loop"), memory=1e-3)


def test_capturable_goes_on_as_foreach_and_fused() -> None:
    assert_same(of("Adam", {}, "capturable loop", FOREACH), of("Adam", {}, "capturable"), memory=1e-3)
    assert_same(of("Adam", {}, "capturable", FUSED), of("Adam", {}, "fused"))
    assert_same(of("RMSprop", {}, "capturable loop", FOREACH), of("RMSprop", {}, "capturable"))


def same(one: Graph, other: Graph) -> bool:
    return [described(one, op) for op in one.ops] == [described(other, op) for op in other.ops]


def test_what_is_capturable_or_needs_not_be_stays() -> None:
    for kind, form in (("Adam", "fused"), ("Adam", "capturable"), ("SGD", "foreach")):
        assert same(of(kind, {}, form, CAPTURABLE), of(kind, {}, form))


@pytest.mark.parametrize(("variant", "done"), [(FUSED, "fused"), (FOREACH, "foreach"), (FOREACH, "fused")])
def test_what_is_so_already_stays(variant: Variant, done: str) -> None:
    assert same(of("Adam", {}, done, variant), of("Adam", {}, done))


def test_other_ops_stay_as_they_are() -> None:
    before = of("AdamW", {}, "loop")
    for variant in (FUSED, FOREACH):
        after = of("AdamW", {}, "loop", variant)
        ours, theirs = ([described(g, op) for op in g.ops if op.phase != "optimizer"] for g in (after, before))
        assert ours == theirs


def _decayed(m: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def decayed(form: str, variant: Variant = AS_WRITTEN) -> Graph:
    return captured(lambda m: torch.optim.AdamW(_decayed(m), **FORMS[form]), variant)


def mixed(form: str, variant: Variant = AS_WRITTEN) -> Graph:
    return captured(lambda m: torch.optim.Adam(m.parameters(), **FORMS[form]), variant, mixed=True)


def test_groups_and_dtypes_stay_apart() -> None:
    assert_same(decayed("loop", FOREACH), decayed("foreach"))
    assert_same(decayed("foreach", FUSED), decayed("fused"))
    assert sum(op.name == "aten::_fused_adam_" for op in mixed("fused").ops) == 2
    assert_same(mixed("loop", FUSED), mixed("fused"))
    assert_same(mixed("loop", FOREACH), mixed("foreach"))


def test_two_optimizers_are_two() -> None:
    def two(m: nn.Module, fused: bool) -> list[Any]:
        return [
            torch.optim.SGD(m[0].parameters(), lr=0.1, fused=fused),
            torch.optim.Adam(m[2].parameters(), fused=fused),
        ]

    assert_same(captured(lambda m: two(m, False), FUSED), captured(lambda m: two(m, True)))


def test_a_scaler_no_longer_waits() -> None:
    """Clipping and unscaling stay; the fused op looks on the GPU whether gradients overflowed."""
    base, edited = (
        captured(lambda m: torch.optim.Adam(m.parameters(), foreach=True), v, scaler=True) for v in (AS_WRITTEN, FUSED)
    )
    wanted = captured(lambda m: torch.optim.Adam(m.parameters(), fused=True), scaler=True)
    assert any(op.sync for op in base.ops) and not any(op.sync for op in edited.ops)
    assert_same(edited, wanted)


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
def test_optimizers_without_a_fused_form_are_left_alone(make: Callable[..., Any]) -> None:
    graph = captured(lambda m: make(m.parameters()))
    assert same(captured(lambda m: make(m.parameters()), FUSED), graph)


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
    for variant in (FUSED, FOREACH):
        assert same(capture(build, {}, source="sparse", variant=variant), graph)


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
    loop, foreach = (
        capture(lambda device, f=f: _pictures(device, f), {}, source="p", variant=v)
        for f, v in (("loop", FOREACH), ("foreach", AS_WRITTEN))
    )
    assert [op.name for op in foreach.ops if op.phase == "optimizer"] == ["aten::_foreach_add_"]
    assert_same(loop, foreach)
