"""TF32, autocast, bf16 and fp8 as edits, against captures of the same models with the change in their code."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from edited_models import agree, captured, different, kernels, pictures, tokens
from presage.errors import PresageError
from presage.graph.check import faults
from presage.graph.graph import Graph
from presage.graph.work import flops
from presage.prediction.machine import kernel_times, machine
from presage.whatif.edits import EDITS, NotApplicable, autocast, bf16, cuda_graph, fp8, fused_attention, tf32
from presage.whatif.edits.rewriting.types import promoted

LOW = (("amp", "bfloat16"),)
WHOLE = (("dtype", "bfloat16"),)


def dtypes(graph: Graph, name: str) -> set[str]:
    """Types of the inputs of all ops of a name."""
    return {t.dtype for op in graph.ops if op.name == name for t in graph.inputs_of(op) if t.shape}


def test_tf32_sets_the_flags_and_nothing_else() -> None:
    base, anew = captured(tokens), captured(tokens, ("tf32", True))
    edited = tf32(base)
    assert edited.ops == base.ops
    assert edited.flags["allow_tf32"] and edited.flags["cudnn.allow_tf32"]
    agree(edited, anew, 0.0001, 0.0001, 0.0001)
    with pytest.raises(NotApplicable, match="already"):
        tf32(edited)
    with pytest.raises(NotApplicable, match="float32"):
        tf32(captured(tokens, *WHOLE))


@pytest.mark.parametrize("build", [tokens, pictures])
def test_autocast_is_what_autocast_does(build: Any) -> None:
    edited, anew = autocast()(captured(build)), captured(build, *LOW)
    assert not different(edited, anew)
    agree(edited, anew)
    assert [op.name for op in edited.ops if op.phase == "optimizer"] == [
        op.name for op in anew.ops if op.phase == "optimizer"
    ]


def test_autocast_in_float16() -> None:
    edited, anew = autocast("float16")(captured(pictures)), captured(pictures, ("amp", "float16"))
    assert not different(edited, anew)
    assert EDITS["autocast"].make("fp16")(captured(pictures)) == edited


def test_autocast_casts_weights_once_in_a_pass_and_again_in_the_next() -> None:
    edited, anew = autocast()(captured(tokens, ("accumulate", 2))), captured(tokens, *LOW, ("accumulate", 2))
    assert not different(edited, anew)
    agree(edited, anew)


def test_autocast_of_attention_that_is_written_out() -> None:
    edited, anew = autocast()(captured(tokens, ("how", "manual"))), captured(tokens, ("how", "manual"), *LOW)
    assert not different(edited, anew)
    agree(edited, anew)


def test_autocast_keeps_parameters_gradients_and_the_optimizer() -> None:
    base = captured(tokens)
    edited = autocast()(base)
    assert dtypes(edited, "aten::_fused_adamw_") == {"float32"}
    for role in ("parameter", "gradient", "optimizer"):
        sizes = [sorted(s.nbytes for s in g.storages if s.role == role) for g in (base, edited)]
        assert sizes[0] == sizes[1]


def test_autocast_has_nothing_to_do_twice_or_in_low_precision() -> None:
    with pytest.raises(NotApplicable, match="float32"):
        autocast()(autocast()(captured(tokens)))
    with pytest.raises(NotApplicable, match="float32"):
        autocast()(captured(tokens, *WHOLE))
    with pytest.raises(PresageError, match="bfloat16 or float16"):
        EDITS["autocast"].make("int8")


@pytest.mark.parametrize("build", [tokens, pictures])
@pytest.mark.parametrize("base", [(), LOW])
def test_bf16_is_a_model_in_bfloat16(build: Any, base: Any) -> None:
    edited, anew = bf16(captured(build, *base)), captured(build, *WHOLE)
    agree(edited, anew)
    spurious = {k[0] for k in different(edited, anew)} - {"aten::add", "aten::add_"}  # sums in place or not
    assert not spurious


def test_bf16_halves_the_model_but_not_what_counts_steps() -> None:
    base = captured(tokens)
    edited = bf16(base)
    for role in ("parameter", "gradient"):
        before, after = (sum(s.nbytes for s in g.storages if s.role == role) for g in (base, edited))
        assert after * 2 == before
    steps = [op for op in edited.ops if op.name == "aten::_foreach_add_"]
    assert steps and {t.dtype for op in steps for t in edited.inputs_of(op)} == {"float32"}
    with pytest.raises(NotApplicable, match="float32"):
        bf16(edited)


def test_casts_that_code_asks_for_stay() -> None:
    """Squares of the norm and the loss are computed in float32, the norm's result is bfloat16 again."""
    edited = bf16(captured(tokens))
    assert dtypes(edited, "aten::pow") == {"float32"}
    assert dtypes(edited, "aten::_log_softmax") == {"float32"}
    assert dtypes(edited, "aten::mm") == dtypes(edited, "aten::addmm") == {"bfloat16"}


def test_fp8_replaces_all_three_products_of_a_layer() -> None:
    base = bf16(captured(tokens, ("d", 256)))
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
    edited = fp8(bf16(captured(tokens)))
    assert {t.shape for op in edited.ops if op.name == "aten::mm" for t in edited.inputs_of(op) if 500 in t.shape}
    with pytest.raises(NotApplicable, match="bf16 or autocast"):
        fp8(captured(tokens))
    with pytest.raises(NotApplicable, match="multiples of 16"):
        fp8(fp8(edited)) if kernels(edited)["aten::addmm"] else fp8(edited)


def test_large_fp8_products_take_about_half_as_long() -> None:
    base = bf16(captured(tokens))
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


def test_edits_go_one_after_the_other() -> None:
    base = captured(tokens, ("how", "manual"))
    both = [fused_attention(autocast()(base)), autocast()(fused_attention(base))]
    assert not different(*both)
    for graph in (*both, cuda_graph(both[0]), bf16(both[1]), fp8(both[0])):
        assert not list(faults(graph))
    agree(bf16(both[0]), captured(tokens, ("how", "fused"), *WHOLE))


def test_the_base_is_not_changed_and_the_same_comes_out_again() -> None:
    base = captured(tokens)
    ops, storages = base.ops, base.storages
    assert autocast()(base) == autocast()(base)
    assert (base.ops, base.storages) == (ops, storages)


def test_types_of_mixed_inputs() -> None:
    assert promoted([("bfloat16", False), ("float32", False)]) == "float32"
    assert promoted([("bfloat16", False), ("float32", True)]) == "bfloat16"  # a number in a tensor gives way
    assert promoted([("bfloat16", False), ("float16", False)]) == "float32"
    assert promoted([("int64", False)]) == ""
