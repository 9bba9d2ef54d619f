"""Memory of hand-made steps: peaks, holdings, and the scratch rules against sizes seen on an H200."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.families.conv import Conv
from presage.graph.graph import Event, Graph, Op, Ref, Role, Storage, Tensor, Thread
from presage.memory.allocator import MIB, rounded
from presage.memory.step_memory import memory_profile
from presage.memory.workspace import transient
from presage.memory.workspace_reduce import buffers
from presage.memory.workspace_rnn import Recurrent
from presage.memory.workspace_trees import shipped
from presage.report.step_sections import peak_table, role_table


def strides(shape: tuple[int, ...], last: bool = False) -> tuple[int, ...]:
    """Row-major strides, or channels-last ones."""
    if last:
        n, c, h, w = shape
        return (c * h * w, 1, w * c, c) if n else ()
    out: list[int] = []
    for size in reversed(shape):
        out.insert(0, prod(shape[len(shape) - len(out) :]) if size else 0)
    return tuple(out)


def tensor(place: int, shape: tuple[int, ...], dtype: str = "float32", last: bool = False) -> Tensor:
    return Tensor(place, 0, shape, strides(shape, last), dtype)


def one_op(name: str, inputs: list[Any], outputs: list[Tensor] | None = None, **flags: bool) -> tuple[Graph, Op]:
    """A graph of one op; tensors among the inputs are given as they are."""
    tensors: list[Tensor] = []

    def place(t: Tensor) -> int:
        tensors.append(Tensor(len(tensors), 0, t.shape, t.strides, t.dtype))
        return len(tensors) - 1

    arguments = tuple(Ref(place(i)) if isinstance(i, Tensor) else i for i in inputs)
    op = Op(name, "", arguments, tuple(place(t) for t in outputs or []), "backward", "autograd")
    return Graph((op,), tuple(tensors), (), (), flags={k.replace("_allow", ".allow"): v for k, v in flags.items()}), op


def op(name: str = "aten::relu", thread: Thread = "main") -> Op:
    return Op(name, "", (), (), "forward", thread, module="net")


def step(ops: list[Op], storages: list[tuple[int, Role]], events: list[tuple[int, int, bool]]) -> Graph:
    made = tuple(Storage(i, n, role, f"s{i}", "net.block") for i, (n, role) in enumerate(storages))
    return Graph(tuple(ops), (), made, tuple(Event(*e) for e in events))


def test_peak_is_where_most_is_alive() -> None:
    g = step(
        [op(), op(), op(), op()],
        [(30 * MIB, "parameter"), (20 * MIB, "activation"), (10 * MIB, "activation"), (30 * MIB, "gradient")],
        [(0, 1, True), (1, 2, True), (2, 1, False), (2, 3, True), (3, 2, False), (4, 3, False)],
    )
    p = memory_profile(g)
    assert (p.peak_allocated, p.peak_op, p.before, p.after) == (70 * MIB, 2, 30 * MIB, 30 * MIB)
    assert p.timeline.allocated.tolist() == [50 * MIB, 60 * MIB, 70 * MIB, 60 * MIB]
    assert p.by_role() == {"parameter": 30 * MIB, "gradient": 30 * MIB, "activation": 10 * MIB}
    assert p.by_module(1) == {"net": 70 * MIB}
    assert [h.name for h in p.top(2)] == ["s0", "s3"]
    assert p.peak_reserved >= p.peak_allocated
    assert 0 <= p.fragmentation < 1


def test_gradients_freed_at_the_start_are_those_the_step_before_made() -> None:
    g = step(
        [op(), op()],
        [(40 * MIB, "parameter"), (40 * MIB, "gradient"), (40 * MIB, "gradient")],
        [(0, 1, False), (1, 2, True)],
    )
    p = memory_profile(g, steps=4)
    assert (p.before, p.after, p.peak_allocated, p.peak_reserved) == (80 * MIB, 80 * MIB, 80 * MIB, 80 * MIB)


def test_the_first_step_makes_the_optimizer_state_out_of_what_the_backward_pass_gave_back() -> None:
    update = Op("aten::relu", "", (), (), "optimizer", "main")
    g = step(
        [op(), update],
        [(40 * MIB, "parameter"), (40 * MIB, "optimizer"), (80 * MIB, "activation")],
        [(0, 2, True), (1, 2, False)],
    )
    first, later = memory_profile(g, steps=1), memory_profile(g)
    assert (first.before, first.after, first.peak_reserved) == (40 * MIB, 80 * MIB, 120 * MIB)
    assert (later.before, later.after, later.peak_allocated) == (80 * MIB, 80 * MIB, 160 * MIB)
    assert later.by_role() == {"activation": 80 * MIB, "parameter": 40 * MIB, "optimizer": 40 * MIB}


def test_state_without_an_update_is_there_from_the_second_step_on() -> None:
    assert memory_profile(step([op()], [(4 * MIB, "optimizer")], [])).before == 4 * MIB


def test_a_library_used_late_in_one_step_is_alive_early_in_the_next() -> None:
    g = step([op(), op("aten::mm", "autograd")], [(40 * MIB, "activation")], [(0, 0, True), (1, 0, False)])
    p = memory_profile(g)
    assert (p.peak_op, p.peak_allocated) == (0, 72 * MIB)
    assert sum(h.nbytes for h in p.holdings) == p.peak_allocated


def test_each_thread_has_its_own_cublas_workspace_for_good() -> None:
    g = step([op("aten::mm"), op("aten::mm", "autograd"), op("aten::mm")], [(512, "parameter")], [])
    p = memory_profile(g, steps=1)
    assert p.timeline.allocated.tolist() == [512 + 32 * MIB, 512 + 64 * MIB, 512 + 64 * MIB]
    assert p.by_role()["workspace"] == 64 * MIB


def test_a_bias_row_goes_through_cublaslt() -> None:
    g, _ = one_op("aten::addmm", [tensor(0, (64,)), tensor(0, (32, 16)), tensor(0, (16, 64))])
    assert memory_profile(g, steps=1).peak_allocated == 33 * MIB


def test_an_empty_step() -> None:
    p = memory_profile(step([], [], []))
    assert (p.peak_allocated, p.peak_reserved, p.peak_op, p.holdings) == (0, 0, -1, ())
    assert p.fragmentation == 0


@given(st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 9), st.integers(0, 9)), max_size=25))
def test_holdings_add_up_to_the_peak(pieces: list[tuple[int, int, int]]) -> None:
    events = [(min(a, b), i, True) for i, (_, a, b) in enumerate(pieces)]
    events += [(max(a, b) + 1, i, False) for i, (_, a, b) in enumerate(pieces)]
    g = step(
        [op() for _ in range(10)], [(n, "activation") for n, _, _ in pieces], sorted(events, key=lambda e: (e[0], e[2]))
    )
    p = memory_profile(g, steps=1)
    assert sum(h.nbytes for h in p.holdings) == p.peak_allocated == max([0, *p.timeline.allocated.tolist()])
    more = memory_profile(
        step(list(g.ops), [(n, "activation") for n, _, _ in pieces] + [(MIB, "parameter")], sorted(events))
    )
    assert more.peak_allocated >= p.peak_allocated


# Buffers that the caching allocator's history shows on an H200, PyTorch 2.11.
REDUCTIONS = [
    ((8192, 2304), (0,), (139198464, 72)),
    ((16384, 2048), (0,), (138412032, 64)),
    ((12544, 1536), (0,), (138412032, 48)),
    ((6272, 96), (0,), (1204224, 8)),
    ((2048, 64), (1,), ()),
    ((50257, 4096), (), (6284, 4)),
]


@pytest.mark.parametrize(("shape", "dims", "seen"), REDUCTIONS)
def test_reduction_buffers_as_seen(shape: tuple[int, ...], dims: tuple[int, ...], seen: tuple[int, ...]) -> None:
    assert buffers(shape, strides(shape), dims) == seen


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_short_reductions_need_no_buffers(shape: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    found = buffers(shape, strides(tuple(shape)), dims)
    if prod(shape[d] for d in dims) < 256:
        assert found == ()
    assert found == buffers([1, *shape], strides((1, *shape)), [d + 1 for d in dims])


def test_embedding_backward_as_seen() -> None:
    inputs = [tensor(0, (8192, 2048), "bfloat16"), tensor(0, (8192,), "int64"), 128256, -1, False]
    assert transient(*one_op("aten::embedding_dense_backward", inputs))[-2:] == (72088, 73818112)
    few = [tensor(0, (300, 128)), tensor(0, (300,), "int64"), 500, -1, False]
    assert transient(*one_op("aten::embedding_dense_backward", few)) == ()


def test_attention_backward_as_seen() -> None:
    q, k = tensor(0, (2, 32, 4096, 64), "bfloat16"), tensor(0, (2, 8, 4096, 64), "bfloat16")
    assert transient(*one_op("aten::_scaled_dot_product_cudnn_attention_backward", [q, q, k, k])) == (135266560,)
    q = tensor(0, (4, 16, 2048, 128), "bfloat16")
    assert transient(*one_op("aten::_scaled_dot_product_cudnn_attention_backward", [q, q, q, q])) == (67633408,)
    q = tensor(0, (2, 8, 1000, 96))
    found = transient(*one_op("aten::_scaled_dot_product_efficient_attention_backward", [q, q, q, q]))
    assert found == (64000, 8392704)


def test_kernels_own_attention_ops_take_heads_after_rows() -> None:
    for kind, dtype in (("efficient", "float32"), ("flash", "bfloat16")):
        q, k = (tensor(0, (2, heads, 1000, 64), dtype) for heads in (8, 4))
        turned = [tensor(0, (2, 1000, t.shape[1], 64), dtype) for t in (q, q, k, k)]
        around = transient(*one_op(f"aten::_scaled_dot_product_{kind}_attention_backward", [q, q, k, k]))
        assert transient(*one_op(f"aten::_{kind}_attention_backward", turned)) == around


CONVOLUTIONS = [  # batch, channels, filters, side, kernel, dtype, tf32, channels-last, bytes seen in a forward call
    (32, 64, 64, 112, 3, "float32", True, False, 205668499),
    (32, 64, 64, 112, 3, "bfloat16", True, False, 102834323),
    (32, 64, 64, 112, 3, "float32", False, False, 0),
    (32, 64, 64, 112, 3, "float32", False, True, 205668368),
    (16, 256, 128, 56, 1, "bfloat16", True, False, 0),
    (32, 64, 64, 112, 3, "bfloat16", True, True, 0),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_workspaces_as_seen(case: tuple[Any, ...]) -> None:
    n, c, k, side, kernel, dtype, tf32, last, seen = case
    x, w = tensor(0, (n, c, side, side), dtype, last), tensor(0, (k, c, kernel, kernel), dtype, last and kernel > 1)
    y = tensor(0, (n, k, side, side), dtype, last)
    rest: list[Any] = [None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1]
    found = sum(transient(*one_op("aten::convolution", [x, w, *rest], [y], cudnn_allow_tf32=tf32)))
    assert found == pytest.approx(seen, rel=0.01, abs=1024)


def test_softmax_copies_what_is_not_contiguous() -> None:
    planes, last = tensor(0, (8, 150, 64, 64)), tensor(0, (8, 150, 64, 64), "float32", True)
    assert transient(*one_op("aten::_log_softmax", [planes, 1, False], [planes])) == ()
    assert transient(*one_op("aten::_log_softmax", [last, 1, False], [planes])) == (last.nbytes,)


def test_products_by_image_are_kept_until_they_are_summed() -> None:
    x, w, y = (tensor(0, s) for s in ((32, 256, 56, 56), (64, 256, 1, 1), (32, 64, 56, 56)))
    rest: list[Any] = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]]
    assert transient(*one_op("aten::convolution_backward", [y, x, w, *rest])) == (4 * 32 * 64 * 256,)


def test_a_permuted_sequence_is_copied_before_its_gradients() -> None:
    """So that it is not taken for channels-last: 50 MiB of a text CNN's peak on an H200."""
    dy, w, shape = tensor(0, (256, 128, 196)), tensor(0, (128, 256, 5)), (256, 256, 200)
    plain, permuted = tensor(0, shape), Tensor(0, 0, shape, (51200, 1, 256), "float32")
    rest: list[Any] = [None, [1], [0], [1], False, [0], 1, [True, True, False]]
    alone, copied = (
        sum(transient(*one_op("aten::convolution_backward", [dy, x, w, *rest]))) for x in (plain, permuted)
    )
    assert copied - alone == plain.nbytes


def test_workspaces_found_together_are_those_found_alone() -> None:
    tall = Conv(0, 8, 64, 128, (1, 56, 56), (1, 28, 28), (1, 3, 3), (1, 2, 2), (0, 1, 1), (1, 1, 1), 1, False,
                "bfloat16", 2, False, False)  # fmt: skip
    some = [tall, tall._replace(role=1), tall._replace(role=2, n=64), tall._replace(native=True)]
    trees = shipped()
    none = [None] * len(some)
    assert trees.predict(some, none) == [trees.predict([c], [None])[0] for c in some]
    assert trees.predict(some, none)[3] == 0
    assert trees.predict([tall._replace(channels_last=True)], [None]) == [0]


def test_weight_gradient_by_winograd_as_seen() -> None:
    x, w = tensor(0, (16, 256, 14, 14)), tensor(0, (256, 256, 3, 3))
    mask = [False, True, False]
    assert transient(*one_op("aten::convolution_backward", [x, x, w, mask], cudnn_allow_tf32=False)) == (28311552,)


def test_forward_fourier_as_seen() -> None:
    x, w = tensor(0, (16, 256, 56, 56)), tensor(0, (256, 256, 3, 3))
    assert transient(*one_op("aten::convolution", [x, w, None], [x], cudnn_allow_tf32=False)) == (2355363840,)


def test_forward_fourier_of_unequal_channels_as_seen() -> None:
    x, w, y = tensor(0, (32, 64, 32, 32)), tensor(0, (128, 64, 3, 3)), tensor(0, (32, 128, 32, 32))
    assert transient(*one_op("aten::convolution", [x, w, None], [y], cudnn_allow_tf32=False)) == (346324992,)


WEIGHT_GRADIENTS = [  # input, weight, output, bytes seen of a float32 weight gradient without TF32
    ((64, 256, 14, 14), (256, 256, 3, 3), (64, 256, 7, 7), 18415632),
    ((128, 576, 7, 7), (160, 576, 1, 1), (128, 160, 7, 7), 18464784),
    ((16, 96, 56, 56), (192, 96, 2, 2), (16, 192, 28, 28), 0),
    ((32, 512, 28, 28), (128, 512, 1, 1), (32, 128, 28, 28), 0),
]


@pytest.mark.parametrize(("shape", "weight", "out", "seen"), WEIGHT_GRADIENTS)
def test_many_short_sums_are_computed_channels_last(
    shape: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], seen: int
) -> None:
    inputs = [tensor(0, out), tensor(0, shape), tensor(0, weight), [False, True, False]]
    found = sum(transient(*one_op("aten::convolution_backward", inputs, cudnn_allow_tf32=False)))
    assert found == pytest.approx(seen, abs=1024)


def test_a_group_has_as_many_channels_in_as_out() -> None:
    def bytes_of(channels: int, filters: int) -> int:
        x, y = tensor(0, (16, channels, 28, 28), "bfloat16"), tensor(0, (16, filters, 28, 28), "bfloat16")
        w, rest = (
            tensor(0, (filters, 8, 3, 3), "bfloat16"),
            [None, [1, 1], [1, 1], [1, 1], False, [0, 0], channels // 8],
        )
        return sum(transient(*one_op("aten::convolution", [x, w, *rest], [y])))

    assert bytes_of(256, 256) == pytest.approx(12881936, rel=0.01)  # as seen
    assert bytes_of(128, 256) == pytest.approx(bytes_of(256, 256), rel=0.01)


def test_grouped_volumes_are_copied_group_by_group() -> None:
    x, w, y = (tensor(0, s) for s in ((4, 16, 32, 32, 32), (32, 4, 3, 3, 3), (4, 32, 16, 16, 16)))
    found = transient(*one_op("aten::convolution", [x, w, None], [y], cudnn_allow_tf32=False))
    assert found == (x.nbytes + y.nbytes,)


@pytest.mark.parametrize(("dropout", "train", "state"), [(0.2, True, 24 * 2048 * 132), (0.2, False, 0), (0.0, True, 0)])
def test_recurrent_dropout_keeps_a_state(dropout: float, train: bool, state: int) -> None:
    x = tensor(0, (100, 32, 128))
    rest: list[Any] = [[], 4, None, None, None, 1, 256, 0, 2, False, dropout, train, False, [], None]
    p = memory_profile(one_op("aten::_cudnn_rnn", [x, *rest])[0])
    assert sum(h.nbytes for h in p.holdings if h.name.startswith("cudnn dropout")) == state


RESERVES = [  # mode, steps, batch, features, hidden, layers, directions, itemsize, bytes seen
    (2, 100, 32, 128, 256, 2, 1, 4, 36045056),
    (2, 50, 64, 256, 512, 1, 2, 2, 32768256),
    (3, 200, 16, 512, 512, 3, 1, 4, 131072256),
    (1, 200, 16, 512, 512, 3, 1, 2, 16384256),
]


@pytest.mark.parametrize("case", RESERVES)
def test_recurrent_reserves_as_seen(case: tuple[int, ...]) -> None:
    *shape, seen = case
    assert Recurrent(*shape).kept == seen


def test_a_reserve_without_a_size_gets_one() -> None:
    x, state, reserve = (100, 32, 128), (2, 32, 256), Tensor(2, 2, (0,), (1,), "uint8")
    tensors = (Tensor(0, 0, x, strides(x), "float32"), Tensor(1, 1, state, strides(state), "float32"), reserve)
    inputs: tuple[Any, ...] = (Ref(0), [Ref(1)], 4, None, Ref(1), None, 2, 256, 0, 2, False, 0.0, True, False, [], None)
    made = (Storage(0, 512, "input"), Storage(1, 512, "activation"), Storage(2, 0, "activation"))
    rnn = Op("aten::_cudnn_rnn", "", inputs, (1, 2), "forward", "main")
    g = Graph((rnn,), tensors, made, (Event(0, 1, True), Event(0, 2, True), Event(1, 1, False), Event(1, 2, False)))
    assert rounded(36045056) in [h.nbytes for h in memory_profile(g).holdings]


def test_larger_batches_never_need_less() -> None:
    def bytes_of(n: int) -> int:
        x, w = tensor(0, (n, 64, 56, 56), "bfloat16"), tensor(0, (64, 64, 3, 3), "bfloat16")
        return sum(transient(*one_op("aten::convolution_backward", [x, x, w, [True, True, True]])))

    assert all(a <= b for a, b in pairwise(bytes_of(n) for n in (1, 2, 8, 32, 128)))


def test_tables_name_what_is_alive() -> None:
    p = memory_profile(
        step([op("aten::mm")], [(30 * MIB, "parameter"), (4 * MIB, "activation")], [(0, 1, True), (1, 1, False)])
    )
    cells = {cell for table in (peak_table(p, "aten::mm"), role_table(p)) for row in table.rows for cell in row}
    assert {"66 MiB", "parameters", "activations", "workspace", "aten::mm"} <= cells
