"""A Tape: the kernels that float32 transformers launch in eager PyTorch 2.1, both ways, as calls of kernel models.

Ops that only look at shapes launch nothing and are not here. A backward pass adds to gradients that are there already.
With `fused` set, chains of element-wise ops are one kernel each, as torch.compile makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from presage.costs.call import Call, Shape

FLOAT = 4  # bytes
OWN, POOLED = 10e6, 1e6  # bytes of tensors that get memory of their own, and that share blocks
POOLS = (20e6, 2e6)  # bytes of such blocks, and of those for tensors that are smaller still


def dense(*sizes: int, dtype: str = "float32") -> Shape:
    strides = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return Shape(sizes, strides, dtype)


def turned(t: Shape) -> Shape:
    """The last two dimensions exchanged, as a view."""
    at = (*range(len(t.sizes) - 2), -1, -2)
    return Shape(tuple(t.sizes[i] for i in at), tuple(t.strides[i] for i in at), t.dtype)


@dataclass
class Tape:
    """What runs, with how often; `times` is how often whatever comes next does."""

    train: bool
    fused: bool = False
    times: int = 1
    forward: list[tuple[Call, int]] = field(default_factory=list)
    backward: list[tuple[Call, int]] = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)  # bytes that the way back needs, and how often
    weights: list[tuple[float, int]] = field(default_factory=list)  # bytes of parameters, each with a gradient as large
    waiting: list[tuple[int, int]] = field(default_factory=list)  # ops that are issued while the GPU idles
    scattered: list[tuple[int, int]] = field(default_factory=list)  # bytes read one number here, one there

    @property
    def launches(self) -> int:
        """Launches of the forward pass."""
        return sum(n for _, n in self.forward)

    @property
    def allocations(self) -> float:
        """How often memory is asked for from the driver, where none was there before."""
        return sum(n * (1.0 if b >= OWN else b / POOLS[b < POOLED]) for b, n in self.kept)

    @property
    def given_back(self) -> float:
        """Bytes of the forward pass that the driver has back before the next one."""
        return sum(b * n for b, n in self.kept)

    @property
    def held(self) -> float:
        """Bytes that stay from pass to pass: parameters and their gradients."""
        return 2.0 * sum(b * n for b, n in self.weights)

    @property
    def exposed(self) -> int:
        return sum(ops * n for ops, n in self.waiting)

    def keep(self, *elements: float) -> None:
        if self.train:
            self.kept += [(FLOAT * e, self.times) for e in elements]

    def wait(self, ops: int) -> None:
        self.waiting.append((ops, self.times))

    def scatter(self, elements: int) -> None:
        self.scattered.append((FLOAT * elements, self.times))

    def run(self, *calls: Call) -> None:
        self.forward += [(c, self.times) for c in calls]

    def back(self, *calls: Call) -> None:
        if self.train:
            self.backward += [(c, self.times) for c in calls]

    # ---- products

    def linear(self, rows: int, k: int, n: int, bias: bool = True, turn: bool = True, inner: bool = True) -> None:
        """y[rows, n] = x[rows, k] w; `turn`: the weights lie as [n, k]. `inner`: x needs a gradient."""
        x, y = dense(rows, k), dense(rows, n)
        w = turned(dense(n, k)) if turn else dense(k, n)
        self.run(Call("aten::addmm", (dense(n), x, w, 1, 1)) if bias else Call("aten::mm", (x, w)))
        if inner:
            self.back(Call("aten::mm", (y, turned(w))))
        self.back(Call("aten::mm", (turned(y), x) if turn else (turned(x), y)))
        self.added(n * k)
        if bias:
            self.back(Call("aten::sum", (y, (0,), True)))
            self.added(n)

    def bmm(self, batch: int, m: int, k: int, n: int, across: bool = False) -> None:
        """`across`: the right matrix lies with its rows along k."""
        a, y = dense(batch, m, k), dense(batch, m, n)
        b = turned(dense(batch, n, k)) if across else dense(batch, k, n)
        self.run(Call("aten::bmm", (a, b)))
        self.back(Call("aten::bmm", (y, turned(b))), Call("aten::bmm", (turned(a), y)))

    # ---- element by element

    def one(self, name: str, elements: int, *numbers: float) -> None:
        """One tensor in."""
        self.run(Call(f"aten::{name}", (dense(elements), *numbers)))

    def two(self, name: str, elements: int) -> None:
        self.run(Call(f"aten::{name}", (dense(elements), dense(elements))))

    def back_one(self, name: str, elements: int, *numbers: float) -> None:
        self.back(Call(f"aten::{name}", (dense(elements), *numbers)))

    def back_two(self, name: str, elements: int) -> None:
        self.back(Call(f"aten::{name}", (dense(elements), dense(elements))))

    def added(self, elements: int) -> None:
        """A gradient added to one that is there."""
        self.weights.append((FLOAT * elements, self.times))
        self.back(Call("aten::add_", (dense(elements), dense(elements), 1)))

    def residual(self, elements: int) -> None:
        """x + f(x): backward the gradients of both ways are added. Compiled it is part of the norm that follows."""
        if not self.fused:
            self.two("add", elements)
        self.back_two("add", elements)

    def dropout(self, elements: int) -> None:
        if self.train:
            self.keep(elements / FLOAT)  # the mask
            x, mask = dense(elements), dense(elements, dtype="bool")
            self.run(Call("aten::native_dropout", (x, 0.1, True)))
            self.back(Call("aten::copy_", (x, mask)), Call("aten::mul", (x, x)))  # the mask times its scale, then both

    def copy(self, target: Shape, source: Shape) -> None:
        self.run(Call("aten::copy_", (target, source)))

    def back_copy(self, target: Shape, source: Shape) -> None:
        self.back(Call("aten::copy_", (target, source)))

    # ---- rows

    def layer_norm(self, rows: int, width: int) -> None:
        x, w = dense(rows, width), dense(width)
        if self.fused:  # with the sum before it: two read, two written
            self.run(Call("aten::addcmul", (x, x, x)))
            return
        self.run(Call("aten::native_layer_norm", (x, (width,), w, w, 1e-5)))
        seen = dense(rows, 1)
        self.back(Call("aten::native_layer_norm_backward", (x, x, (width,), seen, seen, w, w)))
        self.added(width)
        self.added(width)

    def softmax(self, rows: int, width: int) -> None:
        x = dense(rows, width)
        self.run(Call("aten::_softmax", (x, -1, False)))
        self.back_two("mul", rows * width)
        self.back(Call("aten::_softmax_backward_data", (x, x, -1, "float32")))

    def embedding(self, tokens: int, table: int, width: int) -> None:
        """All tokens are the same one."""
        facts = {"distinct": 1.0, "most": float(tokens)}
        index = dense(tokens, dtype="int64")
        self.run(Call("aten::embedding", (dense(table, width), index, -1, False, False), facts=facts))
        grad = Call("aten::embedding_dense_backward", (dense(tokens, width), index, table, -1, False), facts=facts)
        self.back(Call("aten::fill_", (dense(table, width), 0.0)), grad)
        self.added(table * width)

    def loss_gradient(self, rows: int, classes: int) -> None:
        """Gradient of cross entropy: the loss itself is not timed."""
        x = dense(rows, classes)
        self.back(Call("aten::fill_", (x, 0.0)), Call("aten::_log_softmax_backward_data", (x, x, -1, "float32")))
