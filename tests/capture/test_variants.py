"""Variants of a capture against captures of the same models with the change in their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from edited_models import agree, captured, different, pictures, tokens  # noqa: E402
from presage.capture import NotApplicable, Variant, capture  # noqa: E402
from presage.graph.graph import Graph, faults  # noqa: E402

BF16 = "bfloat16"
slow = pytest.mark.slow
TYPES = [{"amp": BF16}, *(pytest.param(a, marks=slow) for a in ({}, {"tf32": True}, {"dtype": BF16}))]


def variant_of(build: Callable[..., Any], variant: Variant, **arguments: Any) -> Graph:
    return capture(lambda device: build(device, **arguments), {}, source="edited_models.py", variant=variant)


def exact(edited: Graph, by_hand: Graph, host: float = 1e-6) -> None:
    """The same kernels, host time and memory."""
    assert not different(edited, by_hand, strides=True)
    agree(edited, by_hand, 1e-9, host, 1e-3)


@pytest.mark.parametrize("build", [tokens, pictures])
@pytest.mark.parametrize(
    ("variant", "by_hand"),
    [
        (Variant(autocast=BF16), ("amp", BF16)),
        pytest.param(Variant(autocast="float16"), ("amp", "float16"), marks=slow),
        (Variant(dtype=BF16), ("dtype", BF16)),
        pytest.param(Variant(tf32=True), ("tf32", True), marks=slow),
    ],
    ids=str,
)
def test_types_are_what_the_code_would_do(build: Any, variant: Variant, by_hand: Any) -> None:
    exact(variant_of(build, variant), captured(build, by_hand))


@pytest.mark.parametrize("build", [tokens, pictures])
def test_a_model_in_bfloat16_has_no_autocast(build: Any) -> None:
    exact(variant_of(build, Variant(dtype=BF16), amp=BF16), captured(build, ("dtype", BF16)))


@pytest.mark.parametrize("arguments", TYPES, ids=str)
def test_channels_last_is_what_the_layout_does(arguments: dict[str, Any]) -> None:
    edited = variant_of(pictures, Variant(channels_last=True), **arguments)
    exact(edited, captured(pictures, ("last", True), *arguments.items()))


@pytest.mark.parametrize("arguments", TYPES, ids=str)
@pytest.mark.parametrize(("spread", "how"), [(False, "fused"), pytest.param(True, "masked", marks=slow)])
def test_written_out_attention_is_fused(arguments: dict[str, Any], spread: bool, how: str) -> None:
    edited = variant_of(tokens, Variant(fused_attention=True), how="manual", spread=spread, **arguments)
    by_hand = captured(tokens, ("how", how), ("spread", spread), *arguments.items())
    assert not different(edited, by_hand)
    agree(edited, by_hand, 1e-9, 0.01, 1e-3)  # keys are still transposed, which is a view


def test_dropout_goes_into_the_fused_kernel() -> None:
    edited = variant_of(tokens, Variant(fused_attention=True), how="dropped", amp=BF16)
    attends = [op for op in edited.ops if op.name == "aten::_cudnn_attention_forward"]
    assert len(attends) == 2 and all(op.inputs[9] == 0.1 for op in attends)
    assert not [op for op in edited.ops if op.name == "aten::native_dropout"]


def test_products_that_are_no_attention_stay() -> None:
    def build(device: Any) -> Any:
        a, b = (torch.randn(4, 32, 32, device=device, requires_grad=True) for _ in range(2))

        def step() -> None:
            scores = a @ b
            (scores.relu() @ b + (scores / 2).exp() + scores.shape[0]).sum().backward()

        return step

    plain, edited = (variant_of(build, v) for v in (Variant(), Variant(fused_attention=True)))
    assert not different(plain, edited)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("arguments", [{}, {"amp": BF16}], ids=str)
def test_microbatches_are_what_a_loop_gives(count: int, arguments: dict[str, Any]) -> None:
    edited = variant_of(tokens, Variant(accumulate=count), **arguments)
    exact(edited, captured(tokens, ("accumulate", count), *arguments.items()))


@pytest.mark.slow
def test_variants_go_together() -> None:
    both = Variant(autocast=BF16) | Variant(accumulate=2)
    exact(variant_of(tokens, both), captured(tokens, ("amp", BF16), ("accumulate", 2)))
    both = Variant(channels_last=True) | Variant(autocast=BF16)
    exact(variant_of(pictures, both), captured(pictures, ("amp", BF16), ("last", True)))
    both = Variant(fused_attention=True) | Variant(dtype=BF16)
    edited = variant_of(tokens, both, how="manual")
    assert not different(edited, captured(tokens, ("how", "fused"), ("dtype", BF16)))


def test_a_later_variant_wins_and_microbatches_multiply() -> None:
    both = Variant(autocast="float16", accumulate=2) | Variant(autocast=BF16, accumulate=3)
    assert both == Variant(autocast=BF16, accumulate=6)
    assert not Variant() and str(Variant(tf32=True, accumulate=2)) == "tf32=True, accumulate=2"


def test_nothing_is_left_behind() -> None:
    owners = (nn.Module, torch.optim.Optimizer, torch.optim.Adam, torch.amp.autocast_mode.autocast)
    before = [dict(vars(owner)) for owner in owners], torch.autograd._engine_run_backward
    whole = Variant(BF16, BF16, True, True, "fused", True, True, "", 2, True)
    variant_of(tokens, whole)
    assert ([dict(vars(owner)) for owner in owners], torch.autograd._engine_run_backward) == before


def test_a_step_without_a_backward_pass_has_no_microbatches() -> None:
    with pytest.raises(NotApplicable, match="no backward pass"):
        variant_of(lambda device: lambda: torch.ones(8, device=device).relu(), Variant(accumulate=2))


def test_a_graph_says_how_it_was_captured() -> None:
    graph = variant_of(tokens, Variant(autocast=BF16))
    assert graph.variant == {"autocast": BF16} and not list(faults(graph))
    assert Variant(**graph.variant) == Variant(autocast=BF16)  # type: ignore[arg-type]
