"""The transformers that NeuSight timed, as the kernels they launch: model, mode, batch and sequence length to a Tape.

They are Hugging Face's, float32 and eager: BERT (with the pre-training heads in training, a classifier else), GPT-2 and
GPT-3 by GPT-2's code, OPT, Switch (T5 with experts). Sizes are those of the published configurations. All tokens are
the same, so all go to one expert, up to its capacity. Checked op by op against the lists of ops beside the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from presage.costs.call import Call, Shape
from presage_validation.label_ops import Tape, dense, turned

CAPACITY, EXPERTS = 64, 4
ISSUED = 20  # ops of an expert, issued one by one: which rows are its own is asked of the GPU
TYPES = 2  # rows of BERT's table of sentences

Step = Callable[[Tape, "LabelCase"], None]


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

    @property
    def wide(self) -> int:
        """Elements of an activation."""
        return self.rows * self.net.width

    @property
    def inner(self) -> int:
        """Elements between the two linear layers of a feed-forward block."""
        return self.rows * self.net.inner

    @property
    def scores(self) -> Shape:
        """Attention scores."""
        return dense(self.batch, self.net.heads, self.length, self.length)


def tape(case: LabelCase) -> Tape:
    """Run the program of a case's net, part by part, each as often as it says."""
    out, layers = Tape(case.train, case.fused), case.layers
    times = {"once": 1, "layers": layers, "twice": 2 * layers, "dense": (layers + 1) // 2, "sparse": layers // 2}
    for repeat, names in PROGRAMS[case.net.kind]:
        out.times = times[repeat]
        for name in names.split():
            STEPS[name](out, case)
    return out


# ---- attention


def _heads(c: LabelCase, row: int) -> tuple[Shape, Shape]:
    """[batch, heads, length, head] of its own, and as a view of rows of `row` numbers."""
    b, h, s, d = c.batch, c.net.heads, c.length, c.net.head
    return dense(b, h, s, d), Shape((b, h, s, d), (s * row, d, row, 1), "float32")


def _attention(t: Tape, c: LabelCase) -> None:
    """Queries and keys to context. Views of several sequences are copied before a product, in OPT by the model."""
    n, copied = c.net, c.net.kind == "opt"
    own, seen = _heads(c, 3 * n.width if n.kind == "gpt" else n.across)
    b, h, s, d = own.sizes
    copies = copied or b > 1
    if copies:
        t.copy(own, seen)
        t.copy(own if copied else dense(b, h, d, s), seen if copied else turned(seen))
    t.bmm(b * h, s, d, s, across=copied or b == 1)
    SCORES[n.kind](t, c)
    t.softmax(b * h * s, s)
    t.keep(*[b * h * s * s] * 2, *[b * h * s * d] * 4)  # scores, and what comes of them; queries, keys, values, context
    if not copied:
        t.dropout(b * h * s * s)
    if copies:
        t.copy(own, seen)
    t.bmm(b * h, s, s, d)
    joined, apart = dense(b, s, h, d), Shape((b, s, h, d), (h * s * d, d, s * d, 1), "float32")
    t.copy(joined, apart)
    if copies:
        t.back_copy(own, _heads(c, n.across)[1])
    for _ in range(3):
        t.back_copy(joined, apart)


def _bert_scores(t: Tape, c: LabelCase) -> None:
    x = c.scores
    if not t.fused:
        t.one("div", x.elements, 8.0)
        t.run(Call("aten::add", (x, dense(c.batch, 1, 1, c.length), 1)))
    t.back_one("div", x.elements, 8.0)


def _gpt_scores(t: Tape, c: LabelCase) -> None:
    x = c.scores
    mask = dense(1, 1, c.length, c.length, dtype="bool")
    if not t.fused:
        t.one("div", x.elements, 8.0)
        t.run(Call("aten::where", (mask, x, 0.0)))
    t.back_one("div", x.elements, 8.0)
    t.back(Call("aten::where", (mask, x, 0.0)))


def _opt_scores(t: Tape, c: LabelCase) -> None:
    """Plus the mask, then no less than the least number, backward in five steps."""
    x = c.scores
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


def _switch_scores(t: Tape, c: LabelCase) -> None:
    """Plus the bias of positions, which was looked up by pairs of them, so that its heads lie side by side."""
    x, h, s = c.scores, c.net.heads, c.length
    t.run(Call("aten::add", (x, dense(1, h, s, s), 1)))
    for _ in range(c.batch):
        t.scatter(h * s * s)
    if c.batch > 1:
        t.back(Call("aten::sum", (x, (0,), True)))
    t.back_two("add", x.elements // c.batch)


# ---- other parts


def _linear(inputs: str, outputs: str, times: int = 1) -> Step:
    """A linear layer between two widths of the net; GPT-2's weights lie the other way, T5's have no bias."""

    def step(t: Tape, c: LabelCase) -> None:
        kind, sizes = c.net.kind, (getattr(c.net, inputs), times * getattr(c.net, outputs))
        t.linear(c.rows, *sizes, bias=kind != "switch", turn=kind != "gpt")

    return step


def _split_heads(t: Tape, c: LabelCase) -> None:
    """Queries, keys and values out of one tensor; backward their gradients are joined."""
    part = dense(c.rows, c.net.width)
    t.back(Call("aten::cat", ((part, part, part), 1)))


def _scale_queries(t: Tape, c: LabelCase) -> None:
    t.one("mul", c.wide, 0.1)
    t.back_one("mul", c.wide, 0.1)


def _mask(t: Tape, c: LabelCase) -> None:
    mask = c.batch * c.length * c.length
    t.one("sub", mask, 1.0)
    t.two("add", mask)
    t.two("add", mask)


def _fan(t: Tape, c: LabelCase) -> None:
    """A tensor that three ops read: backward their gradients are added."""
    t.back_two("add", c.wide)
    t.back_two("add", c.wide)


def _activation(name: str, backward: str) -> Step:
    def step(t: Tape, c: LabelCase) -> None:
        t.one(name, c.inner)
        t.back_two(backward, c.inner)

    return step


def _gelu_new(t: Tape, c: LabelCase) -> None:
    """x/2 (1 + tanh(a (x + b x^3))), op by op."""
    n = c.inner
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


def _rms(t: Tape, c: LabelCase) -> None:
    """T5's norm, op by op."""
    n, rows, width = c.wide, c.rows, c.net.width
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


def _feed_forward(t: Tape, rows: int, n: Net) -> None:
    t.linear(rows, n.width, n.inner, bias=False)
    t.one("relu", rows * n.inner)
    t.back_two("threshold_backward", rows * n.inner)
    t.dropout(rows * n.inner)
    t.linear(rows, n.inner, n.width, bias=False)
    t.keep(rows * n.inner, rows * n.inner)


def _experts(t: Tape, c: LabelCase) -> None:
    """One expert has rows, as many as its capacity lets in; the others have none, but gradients of zeros."""
    n, wide = c.net, c.wide
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


def _head(t: Tape, c: LabelCase, bias: bool = False) -> None:
    t.linear(c.rows, c.net.width, c.net.vocab, bias=bias)
    t.loss_gradient(c.rows, c.net.vocab)


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


SCORES: dict[str, Step] = {"bert": _bert_scores, "gpt": _gpt_scores, "opt": _opt_scores, "switch": _switch_scores}
STEPS: dict[str, Step] = {
    "words": lambda t, c: t.embedding(c.rows, c.net.vocab, c.net.width),
    "types": lambda t, c: t.embedding(c.rows, TYPES, c.net.width),
    "positions": lambda t, c: t.embedding(c.length, c.net.positions, c.net.width),
    "positions_of_each": lambda t, c: t.embedding(c.rows, c.net.positions, c.net.width),
    "add": lambda t, c: t.two("add", c.wide),
    "norm": lambda t, c: t.layer_norm(c.rows, c.net.width),
    "dropout": lambda t, c: t.dropout(c.wide),
    "residual": lambda t, c: t.residual(c.wide),
    "project": _linear("width", "across"),
    "project_all": _linear("width", "width", 3),
    "merge": _linear("across", "width"),
    "up": _linear("width", "inner"),
    "down": _linear("inner", "width"),
    "gelu": _activation("gelu", "gelu_backward"),
    "relu": _activation("relu", "threshold_backward"),
    "feed_forward": lambda t, c: _feed_forward(t, c.rows, c.net),
    "keep_1": lambda t, c: t.keep(*[c.wide] * 4, c.inner),
    "keep_2": lambda t, c: t.keep(*[c.wide] * 4, *[c.inner] * 2),
    "keep_5": lambda t, c: t.keep(*[c.wide] * 4, *[c.inner] * 5),
    "split_heads": _split_heads,
    "scale_queries": _scale_queries,
    "mask": _mask,
    "fan": _fan,
    "attention": _attention,
    "gelu_new": _gelu_new,
    "rms": _rms,
    "experts": _experts,
    "head": _head,
    "bert_head": _bert_head,
}
_FEED = "up {} down dropout residual"
_T5 = "rms project project project fan attention merge dropout residual"
_T5_REST = (("layers", "rms dropout residual"), ("dense", "feed_forward"), ("sparse", "experts"), ("once", "rms"))
# By kind of net: how often (see `tape`), and which steps.
PROGRAMS: dict[str, tuple[tuple[str, str], ...]] = {
    "bert": (
        ("once", "words types positions add add norm dropout"),
        ("layers", "project project project attention merge dropout residual fan norm"),
        ("layers", f"{_FEED.format('gelu')} norm keep_2"),
        ("once", "bert_head"),
    ),
    "gpt": (
        ("once", "words positions add dropout"),
        ("layers", "norm project_all split_heads attention merge dropout residual norm"),
        ("layers", f"{_FEED.format('gelu_new')} keep_5"),
        ("once", "norm head"),
    ),
    "opt": (
        ("once", "words positions_of_each add mask"),
        ("layers", "norm project project project scale_queries fan attention merge dropout residual norm"),
        ("layers", f"{_FEED.format('relu')} keep_1"),
        ("once", "norm head"),
    ),
    "switch": (
        ("once", "words dropout"), ("layers", _T5), *_T5_REST,  # the encoder
        ("once", "words dropout"), ("twice", _T5), *_T5_REST,  # the decoder, which has two attentions a layer
        ("once", "head"),
    ),
}  # fmt: skip
