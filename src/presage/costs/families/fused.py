"""Fused kernels: any chain of elementwise work and reductions over the same loops, as a compiler or a hand writes them.

Law: as PyTorch's own elementwise kernels that read and write as many bytes, of which as many are read. Beyond that, in
bytes a kernel could move meanwhile: random numbers (one draw makes one number, where PyTorch's own kernels make four),
error functions and exponentials where they take longer than the bytes, sums down columns, what is turned on the way.
Kernels written by hand with sums along rows, whose results they use, are as PyTorch's own layer norm.
These numbers are from the kernels of four compiled steps measured on an H200 (compile/decoder, encoder, mlp and unet of
`workloads/edited.py`, PyTorch 2.11); other compiled steps are for scoring.
"""

from __future__ import annotations

from presage.costs.call import Call, Shape

FUSED_OPS = ("triton::pointwise", "triton::reduction", "fused::pointwise", "fused::reduction")
RANDOM = 9.6  # bytes that could be moved while one random number is drawn
ERF = 9.8  # while the error function of one element is computed
EXP = 5.0  # while an exponential is
# In a row too long for a block: the first exponential of an element, what a row of so many elements adds to it, and
# each further one of the same element (a capped logit's). From compiled cross entropies over 4,096 to 128,256 classes
# (data/h200_compiled.json).
LONG_EXP, LONG_ROW, NEXT_EXP = 5.1, 12e3, 1.9
DOWN = 1.2  # bytes moved, for a byte read down columns
TURNED = 1.5  # and for one that is written in another order than read
START, START_DOWN = 1.5e6, 6e6  # while a reduction along rows or down columns gets going
ROW = 64  # the shortest row of a norm
LONG = 1024  # a longer row does not stay in a block
WIDTH = 4


def fused_parts(call: Call) -> list[Call]:
    """A cast, or an elementwise op with one, two or three inputs for its output, as large as to move as much."""
    read, written, columns = (call.number(k) for k in (1, 2, 4))
    down, reduces = bool(call.number(5)), call.name.endswith("reduction")
    moved = (read + written) * (DOWN if down else TURNED if call.number(9) else 1.0) + (
        0 if not reduces else START_DOWN if down else START
    )
    random, erf, exp = (call.number(k) for k in (6, 7, 8))
    moved = max(moved, ERF * erf + _exponentials(exp, call.number(3) * columns, columns)) + RANDOM * random
    if len(call.sized) == 1 and read == 2 * written and moved == read + written:
        n = max(1, round(written / 2))
        return [Call("aten::copy_", (_row(n, "bfloat16"), _row(n, "float32"), False))]
    if call.name == "fused::reduction" and not down and columns >= ROW and 4 * written > read:
        return [_norm(moved, int(columns))]
    inputs = 1 if read < 1.5 * written else 2 if read < 2.5 * written else 3
    name = {1: "aten::neg", 2: "aten::add", 3: "aten::addcmul"}[inputs]
    return [Call(name, (_row(max(1, round(moved / (inputs + 1) / WIDTH)), "float32"),) * inputs)]


def _exponentials(count: float, elements: float, columns: float) -> float:
    """Bytes that could be moved while so many exponentials are computed."""
    if columns <= LONG:
        return EXP * count
    first = min(count, elements)
    return (LONG_EXP + LONG_ROW / columns) * first + NEXT_EXP * (count - first)


def _norm(moved: float, columns: int) -> Call:
    """A layer norm that moves as many bytes."""
    rows, scale = max(1, round(moved / (2 * WIDTH * columns))), _row(columns, "float32")
    x = Shape((rows, columns), (columns, 1), "float32")
    return Call("aten::native_layer_norm", (x, (columns,), scale, scale, 1e-5))


def _row(n: int, dtype: str) -> Shape:
    return Shape((n,), (1,), dtype)
