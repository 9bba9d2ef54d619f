"""Fused attention as an edit, against captures of the same model with scaled_dot_product_attention in its code."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from edited_models import agree, captured, different, tokens
from presage.graph.graph import Graph, Tensor
from presage.whatif.edits import NotApplicable, fused_attention
from presage.whatif.edits.memory_layout import contiguous
from presage.whatif.edits.rewriting.sdpa import Attention, backend

MANUAL, FUSED = ("how", "manual"), ("how", "fused")
TYPES: list[tuple[tuple[str, Any], ...]] = [(), (("amp", "bfloat16"),), (("dtype", "bfloat16"),)]


def squares(graph: Graph, rows: int = 96) -> int:
    """Tensors with a score for each query and key, of each head."""
    return sum(len(t.shape) >= 3 and t.shape[-2:] == (rows, rows) for op in graph.ops for t in graph.outputs_of(op))


@pytest.mark.parametrize("dtype", TYPES)
def test_causal_attention_is_fused(dtype: Any) -> None:
    base, anew = captured(tokens, MANUAL, *dtype), captured(tokens, FUSED, *dtype)
    edited = fused_attention(base)
    agree(edited, anew)
    assert not {k for k in different(edited, anew) if k[0] != "aten::copy_"}  # casts of keys, turned round or not
    assert squares(base) and not squares(edited)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mask_of_each_sample_is_added(dtype: Any) -> None:
    base = captured(tokens, MANUAL, ("spread", True), *dtype)
    anew = captured(tokens, ("how", "masked"), ("spread", True), *dtype)
    edited = fused_attention(base)
    agree(edited, anew, gpu=0.02)
    attends = [op for op in edited.ops if op.name.endswith("_attention_forward")]
    assert all(any(t.shape[-2:] == (96, 96) for t in edited.inputs_of(op)) for op in attends)


def test_dropout_goes_into_the_kernel() -> None:
    edited = fused_attention(captured(tokens, ("how", "dropped"), ("amp", "bfloat16")))
    attends = [op for op in edited.ops if op.name == "aten::_cudnn_attention_forward"]
    assert len(attends) == 2 and all(op.inputs[9] == 0.1 for op in attends)
    assert not [op for op in edited.ops if op.name == "aten::native_dropout"]


def test_gradients_reach_queries_keys_and_values() -> None:
    base, edited = captured(tokens, MANUAL), fused_attention(captured(tokens, MANUAL))
    steps = [[op for op in g.ops if op.name == "aten::_fused_adamw_"] for g in (base, edited)]
    shapes = [
        sorted(t.shape for op in ops for t in g.inputs_of(op)) for g, ops in zip((base, edited), steps, strict=True)
    ]
    assert shapes[0] == shapes[1]
    back = [op for op in edited.ops if op.name.endswith("_attention_backward")]
    assert len(back) == 2 and all(len(op.outputs) == 3 for op in back)


def test_the_scores_are_gone_from_memory() -> None:
    from presage.memory.step_memory import memory_profile

    base = captured(tokens, MANUAL)
    assert memory_profile(fused_attention(base)).peak_allocated < memory_profile(base).peak_allocated


def test_nothing_to_fuse() -> None:
    with pytest.raises(NotApplicable, match="written out"):
        fused_attention(captured(tokens, FUSED))
    with pytest.raises(NotApplicable, match="written out"):
        fused_attention(fused_attention(captured(tokens, MANUAL)))


def _tensor(*shape: int, dtype: str = "bfloat16") -> Tensor:
    return Tensor(0, 0, shape, contiguous(shape), dtype)


def test_which_kernel_takes_it() -> None:
    q = _tensor(2, 4, 64, 32)
    assert backend(Attention(q, q, q)) == "cudnn"
    assert backend(Attention(q, q, q, bias=_tensor(2, 4, 64, 64), learnt=True)) == "efficient"
    wide = _tensor(2, 4, 64, 32, dtype="float32")
    assert backend(Attention(wide, wide, wide)) == "efficient"
    odd = _tensor(2, 4, 64, 30)
    assert backend(Attention(odd, odd, odd)) == "flash"
    shared = _tensor(2, 2, 64, 32)
    assert backend(Attention(q, shared, shared)) == "cudnn"
    assert (
        backend(Attention(wide, _tensor(2, 2, 64, 32, dtype="float32"), _tensor(2, 2, 64, 32, dtype="float32")))
        == "math"
    )
