"""The transformers that NeuSight timed, as the kernels they launch: model, mode, batch and sequence length to a Tape.

They are Hugging Face's, float32 and eager: BERT (with the pre-training heads in training, a classifier else), GPT-2 and
GPT-3 by GPT-2's code, OPT, Switch (T5 with experts). Sizes are those of the published configurations. All tokens are
the same, so all go to one expert, up to its capacity. Checked op by op against the lists of ops beside the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from presage.costs.call import Call, Shape
from presage_validation.label_ops import Tape, dense

CAPACITY, EXPERTS = 64, 4
ISSUED = 20  # ops of an expert, issued one by one: which rows are its own is asked of the GPU
TYPES = 2  # rows of BERT's table of sentences


@dataclass(frozen=True)
class Net:
    kind: str
    width: int
    heads: int
    inner: int
    layers: int
    vocab: int
    positions: int = 0
    head: int = 64

    @property
    def across(self) -> int:
        """All heads together."""
        return self.heads * self.head


def _gpt(width: int, heads: int, layers: int, positions: int) -> Net:
    return Net("gpt", width, heads, 4 * width, layers, 50257, positions, width // heads)


NETS = {
    "bert": Net("bert", 768, 12, 3072, 12, 30522, 512),
    "bert_large": Net("bert", 1024, 16, 4096, 24, 30522, 512),
    "gpt2": _gpt(768, 12, 12, 1024),
    "gpt2_med": _gpt(1024, 16, 24, 1024),
    "gpt2_large": _gpt(1280, 20, 36, 1024),
    "gpt2_xl": _gpt(1600, 25, 48, 1024),
    "gpt3_xl": _gpt(3072, 24, 24, 2048),
    "gpt3_27": _gpt(2560, 32, 32, 2048),
    "gpt3_67": _gpt(4096, 32, 32, 2048),
    "gpt3_13": _gpt(5120, 40, 40, 2048),
    "opt_13": Net("opt", 2048, 32, 8192, 24, 50272, 2050),
    "switch4": Net("switch", 768, 12, 3072, 12, 32128),
    "switchxl4": Net("switch", 1024, 32, 16384, 24, 32128, head=128),
}


@dataclass(frozen=True)
class LabelCase:
    """One pass over a batch, or in training both passes."""

    net: Net
    batch: int
    length: int
    train: bool
    layers: int
    fused: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.length


def tape(case: LabelCase) -> Tape:
    out = Tape(case.train, case.fused)
    _BUILD[case.net.kind](out, case)
    return out


# ---- parts that families share


def _heads(c: LabelCase, row: int) -> tuple[Shape, Shape]:
    """[batch, heads, length, head] of its own, and as a view of rows of `row` numbers."""
    b, h, s, d = c.batch, c.net.heads, c.length, c.net.head
    return dense(b, h, s, d), Shape((b, h, s, d), (s * row, d, row, 1), "float32")


def _attention(
    t: Tape, c: LabelCase, scores: Callable[[Tape, LabelCase], None], row: int, copied: bool = False
) -> None:
    """Queries and keys to context. Views of several sequences are copied before a product (`copied`: by the model)."""
    own, seen = _heads(c, row)
    b, h, s, d = own.sizes
    copies = copied or b > 1
    if copies:
        t.copy(own, seen)
        t.copy(own if copied else dense(b, h, d, s), seen if copied else _turned_heads(seen))
    t.bmm(b * h, s, d, s, across=copied or b == 1)
    scores(t, c)
    t.softmax(b * h * s, s)
    t.keep(*[b * h * s * s] * 2, *[b * h * s * d] * 4)  # scores, and what comes of them; queries, keys, values, context
    if c.net.kind != "opt":
        t.dropout(b * h * s * s)
    if copies:
        t.copy(own, seen)
    t.bmm(b * h, s, s, d)
    joined, apart = dense(b, s, h, d), Shape((b, s, h, d), (h * s * d, d, s * d, 1), "float32")
    t.copy(joined, apart)
    if copies:
        t.back_copy(own, _heads(c, c.net.across)[1])
    for _ in range(3):
        t.back_copy(joined, apart)


def _turned_heads(seen: Shape) -> Shape:
    b, h, s, d = seen.sizes
    return Shape((b, h, d, s), (seen.strides[0], seen.strides[1], 1, seen.strides[2]), "float32")


def _fan(t: Tape, elements: int, ways: int) -> None:
    """A tensor that several ops read: backward their gradients are added."""
    for _ in range(ways - 1):
        t.back_two("add", elements)


def _scores(c: LabelCase) -> Shape:
    return dense(c.batch, c.net.heads, c.length, c.length)


def _head(t: Tape, c: LabelCase, bias: bool = False) -> None:
    t.linear(c.rows, c.net.width, c.net.vocab, bias=bias)
    t.loss_gradient(c.rows, c.net.vocab)


# ---- BERT


def _bert_scores(t: Tape, c: LabelCase) -> None:
    x = _scores(c)
    if not t.fused:
        t.one("div", x.elements, 8.0)
        t.run(Call("aten::add", (x, dense(c.batch, 1, 1, c.length), 1)))
    t.back_one("div", x.elements, 8.0)


def _bert(t: Tape, c: LabelCase) -> None:
    n, rows = c.net, c.rows
    wide = rows * n.width
    for size, tokens in ((n.vocab, rows), (TYPES, rows), (n.positions, c.length)):
        t.embedding(tokens, size, n.width)
    t.two("add", wide)
    t.two("add", wide)
    t.layer_norm(rows, n.width)
    t.dropout(wide)
    t.times = c.layers
    for _ in range(3):
        t.linear(rows, n.width, n.width)
    _attention(t, c, _bert_scores, n.width)
    t.linear(rows, n.width, n.width)
    t.dropout(wide)
    t.residual(wide)
    _fan(t, wide, 3)
    t.layer_norm(rows, n.width)
    t.linear(rows, n.width, n.inner)
    t.one("gelu", rows * n.inner)
    t.back_two("gelu_backward", rows * n.inner)
    t.linear(rows, n.inner, n.width)
    t.dropout(wide)
    t.residual(wide)
    t.layer_norm(rows, n.width)
    t.keep(*[wide] * 4, *[rows * n.inner] * 2)
    t.times = 1
    _bert_head(t, c)


def _bert_head(t: Tape, c: LabelCase) -> None:
    """In training words are predicted, which is all that the loss looks at; else a sequence is classed."""
    n, rows = c.net, c.rows
    last, t.train = t.train, False
    t.linear(c.batch, n.width, n.width)
    t.one("tanh", c.batch * n.width)
    t.linear(c.batch, n.width, 2)
    t.train = last
    if last:
        t.linear(rows, n.width, n.width)
        t.one("gelu", rows * n.width)
        t.back_two("gelu_backward", rows * n.width)
        t.layer_norm(rows, n.width)
        _head(t, c, bias=True)


# ---- GPT


def _gpt_scores(t: Tape, c: LabelCase) -> None:
    x = _scores(c)
    mask = dense(1, 1, c.length, c.length, dtype="bool")
    if not t.fused:
        t.one("div", x.elements, 8.0)
        t.run(Call("aten::where", (mask, x, 0.0)))
    t.back_one("div", x.elements, 8.0)
    t.back(Call("aten::where", (mask, x, 0.0)))


def _gelu_new(t: Tape, n: int) -> None:
    """x/2 (1 + tanh(a (x + b x^3))), op by op."""
    if t.fused:
        t.one("gelu", n)
        return
    t.one("mul", n, 0.5)
    t.one("pow", n, 3.0)
    t.one("mul", n, 0.04)
    t.two("add", n)
    t.one("mul", n, 0.8)
    t.one("tanh", n)
    t.one("add", n, 1.0, 1)
    t.two("mul", n)
    for name in ("mul", "mul", "tanh_backward", "mul", "add", "add"):
        t.back_two(name, n)
    t.back_one("pow", n, 2.0)
    for number in (0.8, 0.04, 3.0, 0.5):
        t.back_one("mul", n, number)


def _gpt_net(t: Tape, c: LabelCase) -> None:
    n, rows = c.net, c.rows
    wide = rows * n.width
    t.embedding(rows, n.vocab, n.width)
    t.embedding(c.length, n.positions, n.width)
    t.two("add", wide)
    t.dropout(wide)
    t.times = c.layers
    t.layer_norm(rows, n.width)
    t.linear(rows, n.width, 3 * n.width, turn=False)
    part = dense(rows, n.width)
    t.back(Call("aten::cat", ((part, part, part), 1)))
    _attention(t, c, _gpt_scores, 3 * n.width)
    t.linear(rows, n.width, n.width, turn=False)
    t.dropout(wide)
    t.residual(wide)
    t.layer_norm(rows, n.width)
    t.linear(rows, n.width, n.inner, turn=False)
    _gelu_new(t, rows * n.inner)
    t.linear(rows, n.inner, n.width, turn=False)
    t.dropout(wide)
    t.residual(wide)
    t.keep(*[wide] * 4, *[rows * n.inner] * 5)
    t.times = 1
    t.layer_norm(rows, n.width)
    _head(t, c)


# ---- OPT


def _opt_scores(t: Tape, c: LabelCase) -> None:
    """Plus the mask, then no less than the least number, backward in five steps."""
    x = _scores(c)
    flat, half = dense(x.elements), dense(x.elements, dtype="bool")
    if not t.fused:
        t.run(Call("aten::add", (x, dense(c.batch, 1, c.length, c.length), 1)))
        t.one("clamp_min", x.elements, -1.0)
    t.back(
        Call("aten::eq", (flat, 0.0)),
        Call("aten::div", (flat, 2.0)),
        Call("aten::where", (half, flat, flat)),
        Call("aten::lt", (flat, 0.0)),
        Call("aten::masked_fill_", (flat, half, 0.0)),
    )


def _opt(t: Tape, c: LabelCase) -> None:
    n, rows = c.net, c.rows
    wide = rows * n.width
    t.embedding(rows, n.vocab, n.width)
    t.embedding(rows, n.positions, n.width)
    t.two("add", wide)
    mask = c.batch * c.length * c.length
    t.one("sub", mask, 1.0)
    t.two("add", mask)
    t.two("add", mask)
    t.times = c.layers
    t.layer_norm(rows, n.width)
    for _ in range(3):
        t.linear(rows, n.width, n.width)
    t.one("mul", wide, 0.1)
    t.back_one("mul", wide, 0.1)
    _fan(t, wide, 3)
    _attention(t, c, _opt_scores, n.width, copied=True)
    t.linear(rows, n.width, n.width)
    t.dropout(wide)
    t.residual(wide)
    t.layer_norm(rows, n.width)
    t.linear(rows, n.width, n.inner)
    t.one("relu", rows * n.inner)
    t.back_two("threshold_backward", rows * n.inner)
    t.linear(rows, n.inner, n.width)
    t.dropout(wide)
    t.residual(wide)
    t.keep(*[wide] * 4, rows * n.inner)
    t.times = 1
    t.layer_norm(rows, n.width)
    _head(t, c)


# ---- Switch


def _rms(t: Tape, rows: int, width: int) -> None:
    """T5's norm, op by op."""
    n = rows * width
    x, row = dense(rows, width), dense(rows, 1)
    t.one("pow", n, 2.0)
    t.run(Call("aten::mean", (x, (-1,), True)))
    t.run(Call("aten::add", (row, 1e-6, 1)), Call("aten::rsqrt", (row,)))
    t.run(Call("aten::mul", (x, row)), Call("aten::mul", (x, dense(width))))
    t.back(Call("aten::mul", (x, dense(width))), Call("aten::mul", (x, x)), Call("aten::sum", (x, (0,), True)))
    t.back(Call("aten::mul", (x, row)), Call("aten::mul", (x, x)), Call("aten::sum", (x, (1,), True)))
    t.back_one("mul", n, 2.0)
    t.back(Call("aten::mul", (x, row)))
    t.back_two("add", n)
    t.added(width)
    t.keep(n, n, n)


def _switch_scores(t: Tape, c: LabelCase) -> None:
    """Plus the bias of positions, which was looked up by pairs of them, so that its heads lie side by side."""
    x, h, s = _scores(c), c.net.heads, c.length
    t.run(Call("aten::add", (x, dense(1, h, s, s), 1)))
    for _ in range(c.batch):
        t.scatter(h * s * s)
    if c.batch > 1:
        t.back(Call("aten::sum", (x, (0,), True)))
    t.back_two("add", x.elements // c.batch)


def _t5_attention(t: Tape, c: LabelCase) -> None:
    n, rows = c.net, c.rows
    wide = rows * n.width
    _rms(t, rows, n.width)
    for _ in range(3):
        t.linear(rows, n.width, n.across, bias=False)
    _fan(t, wide, 3)
    _attention(t, c, _switch_scores, n.across)
    t.linear(rows, n.across, n.width, bias=False)
    t.dropout(wide)
    t.residual(wide)


def _feed_forward(t: Tape, rows: int, n: Net) -> None:
    t.linear(rows, n.width, n.inner, bias=False)
    t.one("relu", rows * n.inner)
    t.back_two("threshold_backward", rows * n.inner)
    t.dropout(rows * n.inner)
    t.linear(rows, n.inner, n.width, bias=False)
    t.keep(rows * n.inner, rows * n.inner)


def _experts(t: Tape, c: LabelCase) -> None:
    """One expert has rows, as many as its capacity lets in; the others have none, but gradients of zeros."""
    n, wide = c.net, c.rows * c.net.width
    t.wait(EXPERTS * ISSUED)
    t.linear(c.rows, n.width, EXPERTS, bias=False)
    t.softmax(c.rows, EXPERTS)
    _feed_forward(t, c.batch * min(CAPACITY, c.length), n)
    for _ in range(2 * (EXPERTS - 1)):
        t.back(Call("aten::fill_", (dense(n.width * n.inner), 0.0)))
        t.added(n.width * n.inner)
    for _ in range(2):
        t.two("mul", wide)
        t.back_two("mul", wide)
        t.back_two("mul", wide)


def _switch(t: Tape, c: LabelCase) -> None:
    n, rows = c.net, c.rows
    wide = rows * n.width
    for attentions in (1, 2):  # of an encoder's layer, and of a decoder's
        t.times = 1
        t.embedding(rows, n.vocab, n.width)
        t.dropout(wide)
        t.times = c.layers * attentions
        _t5_attention(t, c)
        t.times = c.layers
        _rms(t, rows, n.width)
        t.dropout(wide)
        t.residual(wide)
        t.times = (c.layers + 1) // 2
        _feed_forward(t, rows, n)
        t.times = c.layers // 2
        _experts(t, c)
        t.times = 1
        _rms(t, rows, n.width)
    _head(t, c)


_BUILD: dict[str, Callable[[Tape, LabelCase], None]] = {"bert": _bert, "gpt": _gpt_net, "opt": _opt, "switch": _switch}
