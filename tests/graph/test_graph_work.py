"""FLOPs and bytes against counts done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from graph_sketches import Sketch
from presage.errors import PresageError
from presage.graph import work
from presage.graph.graph import Graph, Op, Ref
from presage.graph.work import MemoryTraffic


def one(sketch: Sketch, op: Op) -> tuple[Graph, Op]:
    return sketch.graph(), op


def flops(sketch: Sketch, op: Op) -> int:
    return work.flops(*one(sketch, op))


def moved(sketch: Sketch, op: Op) -> MemoryTraffic:
    return work.bytes_moved(*one(sketch, op))


# ---- FLOPs


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("mm", [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("_scaled_mm", [(3, 5), (5, 7), (), ()], 2 * 3 * 5 * 7),
        ("addmm", [(7,), (3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("_addmm_activation", [(7,), (3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("bmm", [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("addbmm", [(3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("linear", [(2, 3, 5), (7, 5), (7,)], 2 * 2 * 3 * 5 * 7),
        ("mv", [(3, 5), (5,)], 2 * 3 * 5),
        ("addmv", [(3,), (3, 5), (5,)], 2 * 3 * 5),
        ("dot", [(5,), (5,)], 2 * 5),
        ("_grouped_mm", [(6, 5), (2, 5, 7)], 2 * 6 * 5 * 7),
        ("_grouped_mm", [(2, 3, 5), (5, 8)], 2 * 3 * 5 * 8),
        ("_grouped_mm", [(3, 6), (6, 7)], 2 * 3 * 6 * 7),
        ("_grouped_mm", [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("add", [(3, 5), (3, 5)], 0),
        ("sum", [(3, 5)], 0),
        ("an_op_nobody_knows", [(3, 5)], 0),
    ],
)
def test_products(name: str, shapes: list[tuple[int, ...]], expected: int) -> None:
    s = Sketch()
    assert flops(s, s.op(name, [s.tensor(*shape) for shape in shapes], [s.new(1)])) == expected


CONV = "input weight bias stride padding dilation transposed output_padding groups"


@pytest.mark.parametrize(
    ("x", "weight", "out", "stride", "dilation", "transposed", "groups", "expected"),
    [
        # each of N*C_out*H_out*W_out outputs sums C_in/groups*K*K products
        ((2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6), 1, 1, False, 1, 2 * (2 * 6 * 6 * 6) * (4 * 9)),
        ((2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 3, 3), 2, 1, False, 1, 2 * (2 * 6 * 3 * 3) * (4 * 9)),
        ((2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 4, 4), 1, 2, False, 1, 2 * (2 * 6 * 4 * 4) * (4 * 9)),
        ((2, 4, 8, 8), (6, 2, 3, 3), (2, 6, 6, 6), 1, 1, False, 2, 2 * (2 * 6 * 6 * 6) * (2 * 9)),
        ((2, 4, 8, 8), (4, 1, 3, 3), (2, 4, 6, 6), 1, 1, False, 4, 2 * (2 * 4 * 6 * 6) * 9),
        # transposed: each of N*C_in*H*W inputs goes into C_out/groups*K*K products
        ((2, 4, 8, 8), (4, 6, 2, 2), (2, 6, 16, 16), 2, 1, True, 1, 2 * (2 * 4 * 8 * 8) * (6 * 4)),
        ((2, 4, 8, 8), (4, 3, 2, 2), (2, 6, 16, 16), 2, 1, True, 2, 2 * (2 * 4 * 8 * 8) * (3 * 4)),
        ((2, 4, 9), (6, 4, 3), (2, 6, 7), 1, 1, False, 1, 2 * (2 * 6 * 7) * (4 * 3)),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_convolutions(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    out: tuple[int, ...],
    stride: int,
    dilation: int,
    transposed: bool,
    groups: int,
    expected: int,
    named: bool,
) -> None:
    s = Sketch()
    tensors = s.tensor(*x), s.tensor(*weight), s.tensor(*out)
    rest: list[Any] = [[stride], [0], [dilation], transposed, [0], groups]
    forward = s.op("convolution", [*tensors[:2], None, *rest], [tensors[2]], names=CONV if named else "")
    assert flops(s, forward) == expected
    backward_names = f"grad_output {CONV.replace('bias', 'bias_sizes')} output_mask" if named else ""
    for mask in ([True, True, True], [False, True, False], [True, False, False], [False, False, True]):
        inputs = [tensors[2], *tensors[:2], [out[1]], *rest, list(mask)]
        backward = s.op("convolution_backward", inputs, [tensors[0]], "backward", names=backward_names)
        assert flops(s, backward) == expected * (mask[0] + mask[1])


def test_convolutions_under_other_names() -> None:
    s = Sketch()
    x, w, y = s.tensor(2, 4, 8, 8), s.tensor(6, 4, 3, 3), s.tensor(2, 6, 6, 6)
    # benchmark=True stands where `transposed` does in another op: it must not be taken for it
    names = "self weight padding stride dilation groups benchmark deterministic allow_tf32"
    cudnn = s.op("cudnn_convolution", [x, w, [0], [1], [1], 1, True, False, True], [y], names=names)
    assert flops(s, cudnn) == 2 * 2 * 6 * 36 * 4 * 9
    up = s.op("cudnn_convolution_transpose", [x, s.tensor(4, 6, 2, 2), [0], [0], [2], [1], 1], [s.tensor(2, 6, 16, 16)])
    assert flops(s, up) == 2 * 2 * 4 * 64 * 6 * 4
    deep = s.op("_conv_depthwise2d", [x, s.tensor(4, 1, 3, 3), [3, 3], None], [s.tensor(2, 4, 6, 6)])
    assert flops(s, deep) == 2 * 2 * 4 * 36 * 9


ATTENTION = [
    ("_scaled_dot_product_cudnn_attention", False),
    ("_scaled_dot_product_flash_attention", False),
    ("_scaled_dot_product_efficient_attention", False),
    ("_cudnn_attention_forward", False),
    ("_flash_attention_forward", True),
    ("_efficient_attention_forward", True),
]


@pytest.mark.parametrize(("name", "rows_first"), ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(name: str, rows_first: bool, causal: bool) -> None:
    b, h, sq, sk, d, dv = 2, 3, 4, 6, 8, 10
    s = Sketch()

    def qkv(rows: int, depth: int) -> Ref:
        return s.tensor(*((b, rows, h, depth) if rows_first else (b, h, rows, depth)))

    q, k, v, out = qkv(sq, d), qkv(sk, d), qkv(sk, dv), qkv(sq, dv)
    mask = "custom_mask_type" if name.startswith("_efficient") else "is_causal"
    forward = s.op(name, [q, k, v, int(causal)], [out], names=f"query key value {mask}")
    backward_name = name.replace("forward", "backward") if "forward" in name else f"{name}_backward"
    names = f"grad_out query key value {mask}"
    backward = s.op(backward_name, [out, q, k, v, int(causal)], [q, k, v], "backward", names=names)
    g = s.graph()
    assert work.flops(g, forward) == b * h * sq * sk * 2 * (d + dv)
    assert work.flops(g, backward) == b * h * sq * sk * 2 * (3 * d + 2 * dv)
    seen = sum(min(i + 1, sk) for i in range(sq)) if causal else sq * sk
    assert work.useful_flops(g, forward) == b * h * seen * 2 * (d + dv)
    assert work.useful_flops(g, backward) == b * h * seen * 2 * (3 * d + 2 * dv)


def test_attention_over_packed_sequences_counts_each_as_the_longest() -> None:
    s = Sketch()
    q, starts = s.tensor(20, 3, 8), s.tensor(5, dtype="int32")
    names = "query key value cum_seq_q cum_seq_k max_q max_k"
    op = s.op("_flash_attention_forward", [q, q, q, starts, starts, 7, 7], [s.new(20, 3, 8)], names=names)
    assert flops(s, op) == 4 * 3 * 7 * 7 * 2 * 16


def test_recurrent_layers() -> None:
    """An LSTM of two layers, both ways: 4 gates, each with an input and a recurrent matrix."""
    steps, batch, features, hidden = 5, 3, 7, 4
    s = Sketch()
    weights: list[Any] = []
    for layer in range(2):
        for _ in range(2):
            size = features if layer == 0 else 2 * hidden
            weights += [s.tensor(4 * hidden, size), s.tensor(4 * hidden, hidden), s.tensor(4 * hidden), s.tensor(16)]
    x = s.tensor(steps, batch, features)
    y = s.new(steps, batch, 2 * hidden)
    forward = s.op("_cudnn_rnn", [x, weights, 4], [y], names="input weight weight_stride0")
    per_row = 2 * 2 * 4 * hidden * (features + hidden) + 2 * 2 * 4 * hidden * (2 * hidden + hidden)
    assert flops(s, forward) == steps * batch * per_row
    for mask, times in (([True] * 4, 2), ([True, True, True, False], 1)):
        backward = s.op("_cudnn_rnn_backward", [x, weights, mask], [x], names="input weight output_mask")
        assert flops(s, backward) == times * steps * batch * per_row
    packed = s.op("_cudnn_rnn", [s.tensor(11, features), weights, [3, 3, 3, 2]], [y], names="input weight batch_sizes")
    assert flops(s, packed) == 11 * per_row


def test_an_op_without_its_tensors_is_an_error_that_names_it() -> None:
    s = Sketch()
    with pytest.raises(PresageError, match=r"aten::mm: input 1 should be a tensor"):
        flops(s, s.op("mm", [s.tensor(3, 5), 2.0], [s.new(1)]))


# ---- bytes


def test_plain_rule() -> None:
    s = Sketch()
    x, y = s.tensor(3, 5, dtype="bfloat16"), s.tensor(3, 5)
    assert moved(s, s.op("add", [x, y, 1], [s.new(3, 5)])) == MemoryTraffic(30 + 60, 60)
    assert moved(s, s.op("nobody_knows", [x, y], [s.new(3, 5)])) == MemoryTraffic(90, 60)
    assert moved(s, s.op("mul", [x, x], [s.new(3, 5)])) == MemoryTraffic(30, 60), "an input named twice is read once"
    assert moved(s, s.op("cat", [[x, y, x]], [s.new(9, 5)])) == MemoryTraffic(90, 180)


def test_views_move_nothing() -> None:
    s = Sketch()
    assert moved(s, s.op("transpose", [s.tensor(3, 5), 0, 1], [s.new(5, 3)], kernels=False)) == MemoryTraffic(0, 0)


def test_repeated_elements_are_read_once() -> None:
    s = Sketch()
    row = s.tensor(5)
    wide = s.view(0, (3, 5), (0, 1), "float32")
    assert moved(s, s.op("add", [s.tensor(3, 5), wide], [s.new(3, 5)])) == MemoryTraffic(60 + 20, 60)
    assert moved(s, s.op("sum", [row, wide], [s.new()])) == MemoryTraffic(20, 4)


def test_views_of_one_storage_count_what_is_under_them() -> None:
    """Weights of a recurrent layer are views of one buffer, which is passed too."""
    s = Sketch()
    buffer = s.tensor(100)
    parts = [s.view(0, (6, 10), (10, 1), "float32"), s.view(0, (40,), (1,), "float32", 60)]
    names = "input weight weight_buf"
    op = s.op("_cudnn_rnn", [s.tensor(5, 3, 7), [*parts], buffer], [s.new(5, 3, 4)], names=names)
    assert moved(s, op).read == 400 + 5 * 3 * 7 * 4
    halves = [s.view(0, (40,), (1,), "float32"), s.view(0, (40,), (1,), "float32", 60)]
    assert moved(s, s.op("add", halves, [s.new(40)])).read == 320


def test_in_place() -> None:
    s = Sketch()
    x, y = s.tensor(3, 5), s.tensor(3, 5)
    assert moved(s, s.op("add_", [x, y], [x], writes=(x,))) == MemoryTraffic(120, 60)
    assert moved(s, s.op("relu_", [x], [x], writes=(x,))) == MemoryTraffic(60, 60)
    for name in ("zero_", "fill_", "normal_"):
        assert moved(s, s.op(name, [x], [x], writes=(x,))) == MemoryTraffic(0, 60)


def test_copies_and_casts() -> None:
    s = Sketch()
    x, y = s.tensor(3, 5, dtype="bfloat16"), s.tensor(3, 5)
    assert moved(s, s.op("copy_", [y, x, False], [y], writes=(y,))) == MemoryTraffic(30, 60)
    assert moved(s, s.op("_to_copy", [y], [s.new(3, 5, dtype="bfloat16")])) == MemoryTraffic(60, 30)
    assert moved(s, s.op("_foreach_copy_", [[y], [x]], [], writes=(y,))) == MemoryTraffic(30, 60)


def test_destinations_are_not_read() -> None:
    s = Sketch()
    x, y = s.tensor(3, 5), s.tensor(5, 7)
    out = s.tensor(3, 7)
    op = s.op("mm", [x, y, out], [out], writes=(out,), names="self mat2 out", overload="out")
    assert moved(s, op) == MemoryTraffic(60 + 140, 84)


def test_bias_is_left_alone_where_beta_is_zero() -> None:
    s = Sketch()
    tensors = [s.tensor(3, 7), s.tensor(3, 5), s.tensor(5, 7)]
    names = "self mat1 mat2 beta alpha"
    assert moved(s, s.op("addmm", [*tensors, 0, 1], [s.new(3, 7)], names=names)) == MemoryTraffic(60 + 140, 84)
    assert moved(s, s.op("addmm", [*tensors, 1, 1], [s.new(3, 7)], names=names)) == MemoryTraffic(60 + 140 + 84, 84)


def test_lookups_read_the_rows_they_gather() -> None:
    s = Sketch()
    table, few, many = s.tensor(1000, 16), s.tensor(6, dtype="int64"), s.tensor(5000, dtype="int64")
    assert moved(s, s.op("embedding", [table, few], [s.new(6, 16)])) == MemoryTraffic(6 * 64 + 48, 6 * 64)
    everything = s.op("embedding", [table, many], [s.new(5000, 16)])
    assert moved(s, everything) == MemoryTraffic(64000 + 40000, 5000 * 64), "never more than the table"
    offsets = s.tensor(2, dtype="int64")
    bags = [s.new(2, 16), s.new(6, dtype="int64")]
    assert moved(s, s.op("_embedding_bag", [table, few, offsets], bags)) == MemoryTraffic(6 * 64 + 48 + 16, 128 + 48)
    assert moved(s, s.op("index", [table, [few, None]], [s.new(6, 16)])) == MemoryTraffic(6 * 64 + 48, 6 * 64)
    assert moved(s, s.op("gather", [table, 1, s.tensor(6, 2, dtype="int64")], [s.new(6, 2)])) == MemoryTraffic(
        48 + 96, 48
    )
    scores, total = s.new(), s.new()
    loss = s.op("nll_loss_forward", [table, s.tensor(1000, dtype="int64"), None, 1, -100], [scores, total])
    assert moved(s, loss) == MemoryTraffic(4000 + 8000, 8)


def test_scatters_write_the_rows_they_hit() -> None:
    s = Sketch()
    x, index, rows = s.tensor(1000, 16), s.tensor(6, dtype="int64"), s.tensor(6, 16)
    touched = 6 * 64
    assert moved(s, s.op("index_add_", [x, 0, index, rows], [x], writes=(x,))) == MemoryTraffic(
        48 + 2 * touched, touched
    )
    assert moved(s, s.op("index_copy_", [x, 0, index, rows], [x], writes=(x,))) == MemoryTraffic(48 + touched, touched)
    put = s.op("index_put_", [x, [index], rows, False], [x], writes=(x,))
    assert moved(s, put) == MemoryTraffic(48 + touched, touched)
    add = s.op("index_put_", [x, [None, index], s.tensor(), True], [x], writes=(x,))
    assert moved(s, add) == MemoryTraffic(48 + 4 + 1000 * 6 * 4, 1000 * 6 * 4)
    wide = s.tensor(6, 16, dtype="int64")
    assert moved(s, s.op("scatter_add_", [x, 0, wide, rows], [x], writes=(x,))) == MemoryTraffic(
        768 + 2 * touched, touched
    )
    fill = s.op("index_fill_", [x, 0, index, 1.0], [x], writes=(x,), names="self dim index value")
    assert moved(s, fill) == MemoryTraffic(48, touched)


def test_sparse_tensors_are_as_large_as_their_values() -> None:
    s = Sketch()
    table, values = s.tensor(1000, 16), s.tensor(6, 16)
    sparse = s.view(s.tensors[values.id].storage, (1000, 16), (), "float32")
    assert moved(s, s.op("clone", [sparse], [s.new(6, 16)])) == MemoryTraffic(6 * 64, 6 * 64)
    assert moved(s, s.op("add_", [table, sparse, 1], [table], writes=(table,))) == MemoryTraffic(2 * 6 * 64, 6 * 64)


def test_convolution_backward_reads_what_its_gradients_need() -> None:
    s = Sketch()
    grad, x, w = s.tensor(2, 6, 6, 6), s.tensor(2, 4, 8, 8), s.tensor(6, 4, 3, 3)
    sizes = [4 * s.tensors[r.id].elements for r in (grad, x, w)]
    weight_only = s.op("convolution_backward", [grad, x, w, None, [1], [False, True, False]], [s.new(6, 4, 3, 3)])
    assert moved(s, weight_only) == MemoryTraffic(sizes[0] + sizes[1], sizes[2])
    both = [s.new(2, 4, 8, 8), s.new(6, 4, 3, 3)]
    all_of_it = s.op("convolution_backward", [grad, x, w, None, [1], [True, True, False]], both)
    assert moved(s, all_of_it) == MemoryTraffic(sum(sizes), sizes[1] + sizes[2])


def test_inputs_taken_for_their_shape() -> None:
    s = Sketch()
    x, target = s.tensor(8, 10), s.tensor(8, dtype="int64")
    loss = s.op("nll_loss_backward", [s.tensor(), x, target, None, 1, -100, s.tensor()], [s.new(8, 10)])
    assert moved(s, loss) == MemoryTraffic(4 + 64 + 4, 320)
    assert moved(s, s.op("zeros_like", [x], [s.new(8, 10)])) == MemoryTraffic(0, 320)
    stats = [s.tensor(10) for _ in range(5)]
    norm = s.op("cudnn_batch_norm_backward", [x, x, *stats, 1e-5, None], [s.new(8, 10)])
    assert moved(s, norm) == MemoryTraffic(320 + 3 * 40, 320)


def test_batch_norm_writes_its_running_statistics_in_training() -> None:
    s = Sketch()
    x, stats = s.tensor(8, 10), [s.tensor(10) for _ in range(4)]
    for training, more in ((True, 80), (False, 0)):
        out = [s.new(8, 10), s.new(10), s.new(10)]
        op = s.op("cudnn_batch_norm", [x, *stats, training, 0.1, 1e-5], out)
        assert moved(s, op) == MemoryTraffic(320 + 160, 320 + 80 + more)


def test_optimizers_by_their_lists() -> None:
    s = Sketch()
    lists = [[s.tensor(10, 10), s.tensor(7)] for _ in range(4)]
    steps = [s.tensor(), s.tensor()]
    changed = tuple(r for group in lists for r in group)  # the schema says gradients may be written as well
    names = "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps grad_scale"
    plain = s.op("_fused_adamw_", [*lists, [], steps, None], [], "optimizer", names=names, writes=changed)
    assert moved(s, plain) == MemoryTraffic(4 * 428 + 8, 3 * 428)
    scaled = s.op("_fused_adamw_", [*lists, [], steps, s.tensor()], [], "optimizer", names=names, writes=changed)
    assert moved(s, scaled) == MemoryTraffic(4 * 428 + 12, 4 * 428)
    added = s.op("_foreach_add_", [lists[0], lists[1]], [], "optimizer", writes=tuple(lists[0]))
    assert moved(s, added) == MemoryTraffic(2 * 428, 428)


def test_work_adds_up() -> None:
    s = Sketch()
    a, b = s.tensor(3, 5), s.tensor(5, 7)
    s.op("mm", [a, b], [s.new(3, 7)])
    s.op("relu", [a], [s.new(3, 5)])
    s.op("view", [a], [s.new(15)], kernels=False)
    found = work.total(s.graph())
    assert (found.ops, found.kernels, found.flops) == (3, 2, 210)
    assert found.bytes == MemoryTraffic(60 + 140 + 60, 84 + 60)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::addmm", "matrix multiply"),
        ("aten::mm", "matrix multiply"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_cudnn_attention_forward", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::cudnn_batch_norm", "normalisation"),
        ("aten::normal_", "random"),
        ("aten::native_dropout", "random"),
        ("aten::_embedding_bag", "embedding"),
        ("aten::_log_softmax", "softmax and loss"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copy and cast"),
        ("aten::sum", "reduction"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::add", "elementwise"),
        ("aten::_cudnn_rnn", "recurrent"),
        ("c10d::allreduce_", "communication"),
        ("mine::fancy", "other"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert work.family(name) == family
