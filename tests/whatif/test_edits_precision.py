"""fp8 as an edit of a graph, and what has no place for edits of precision."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from edited_models import captured, kernels, pictures, tokens
from presage.errors import PresageError
from presage.graph.graph import Graph, faults
from presage.graph.work import flops
from presage.prediction.machine import kernel_times, machine
from presage.whatif.edits import (
    EDITS,
    NotApplicable,
    autocast,
    bf16,
    channels_last,
    cuda_graph,
    fp8,
    fused_attention,
    tf32,
)  # fmt: skip

LOW = (("amp", "bfloat16"),)
WHOLE = (("dtype", "bfloat16"),)


def test_nothing_to_change_is_said_before_a_capture() -> None:
    for edit, base in ((autocast(), LOW), (autocast(), WHOLE), (bf16, WHOLE), (tf32, (("tf32", True),)), (tf32, WHOLE)):
        with pytest.raises(NotApplicable, match="float32"):
            edit(captured(tokens, *base))
    with pytest.raises(NotApplicable, match="no convolution"):
        channels_last(captured(tokens))
    with pytest.raises(NotApplicable, match="written out"):
        fused_attention(captured(tokens))


def test_a_graph_alone_needs_its_code() -> None:
    with pytest.raises(PresageError, match=r"bf16 captures the step again: a graph alone .* give FILE.py:FUNCTION"):
        bf16(captured(pictures))


def test_autocast_has_two_types() -> None:
    assert EDITS["autocast"].make("fp16") == autocast("float16")
    with pytest.raises(PresageError, match="bfloat16 or float16"):
        EDITS["autocast"].make("int8")


def test_fp8_replaces_all_three_products_of_a_layer() -> None:
    base = captured(tokens, ("d", 256), *WHOLE)
    edited = fp8(base)
    assert not list(faults(edited))
    before = sum(flops(base, op) for op in base.ops)
    assert sum(flops(edited, op) for op in edited.ops) == before
    scaled = [op for op in edited.ops if op.name == "aten::_scaled_mm"]
    assert sum(op.thread == "autograd" for op in scaled) == 2 * sum(op.thread == "main" for op in scaled) > 0
    for op in scaled:
        left, right = edited.inputs_of(op)[:2]
        assert left.dtype == right.dtype == "float8_e4m3fn"
        assert left.strides[1] == 1 and right.strides[0] == 1  # rows, and columns
    assert any("fp8" in note for note in edited.notes)


def test_fp8_leaves_sizes_that_are_not_allowed() -> None:
    """The head has 500 words, which 16 does not divide."""
    edited = fp8(captured(tokens, *WHOLE))
    assert {t.shape for op in edited.ops if op.name == "aten::mm" for t in edited.inputs_of(op) if 500 in t.shape}
    with pytest.raises(NotApplicable, match="bf16 or autocast"):
        fp8(captured(tokens))
    with pytest.raises(NotApplicable, match="multiples of 16"):
        fp8(fp8(edited)) if kernels(edited)["aten::addmm"] else fp8(edited)


def test_large_fp8_products_take_about_half_as_long() -> None:
    base = captured(tokens, *WHOLE)
    wide = _widened(base, 64)
    times = [
        sum(t.seconds for t in kernel_times(g, machine("h200")) if t.family == "matrix multiply")
        for g in (wide, fp8(wide))
    ]
    assert 0.45 < times[1] / times[0] < 0.75


def _widened(graph: Graph, factor: int) -> Graph:
    """The same ops with all but the smallest sizes that many times as large: only good for timing products."""
    from msgspec.structs import replace

    def wide(n: int) -> int:
        return n * factor if n >= 128 else n

    tensors = tuple(
        replace(t, shape=tuple(map(wide, t.shape)), strides=tuple(map(wide, t.strides))) if len(t.shape) == 2 else t
        for t in graph.tensors
    )
    return replace(graph, tensors=tensors)


def test_fp8_goes_with_a_cuda_graph() -> None:
    for graph in (cuda_graph(fp8(captured(tokens, *LOW))), fp8(captured(tokens, *WHOLE), eager=True)):
        assert not list(faults(graph))
