"""QR, Cholesky, LU, eigenvalues and singular values: cuSOLVER's factorizations of dense matrices.

Law: column after column, each a few small kernels that wait for one another, on vectors as long as the matrix is high;
so seconds for each column, more for each row of it, and the products behind, which many matrices of a batch share a
GPU for. No sweep: the numbers are published times of single matrices of 64 to 4096 columns in float32 on Hopper GPUs,
QR of pytorch/pytorch#173788 and flagos-ai/FlagGems#5586 (met within 8%), Cholesky of pytorch/pytorch#173515 (within
15%). LU is taken to be half a QR, a Cholesky inverse twice a Cholesky; eigenvalues (tridiagonal form, divide and
conquer) and singular values are general knowledge of these libraries, within a factor of two.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, ln
from presage.costs.rates import Rates


class Columns(NamedTuple):
    """Seconds for each column, and for each row of each; FLOPs over m n^2 of the products behind."""

    column: float
    row: float
    flops: float
    batched: bool = False  # columns of several matrices at once; else one matrix after the other


QR, R = Columns(2.9e-6, 1.16e-9, 8 / 3), Columns(2.4e-6, 0.85e-9, 4 / 3)
CHOLESKY, INVERSE = Columns(0.75e-6, 0.1e-9, 1 / 3, True), Columns(1.5e-6, 0.2e-9, 2 / 3, True)
LU = Columns(1.45e-6, 0.58e-9, 2 / 3)
OPS = {
    "linalg_qr": QR, "geqrf": R, "linalg_householder_product": Columns(0.5e-6, 0.31e-9, 4 / 3),
    "linalg_cholesky_ex": CHOLESKY, "cholesky_inverse": INVERSE, "cholesky_solve": INVERSE,
    "linalg_solve_triangular": INVERSE, "triangular_solve": INVERSE,
    "linalg_lu_factor_ex": LU, "_linalg_solve_ex": LU, "linalg_inv_ex": QR, "_linalg_det": LU,
    "_linalg_eigh": Columns(20e-6, 8e-9, 9.0), "_linalg_svd": Columns(80e-6, 32e-9, 22.0),
}  # fmt: skip
SHARE = 0.13  # of the rate of large products, that the products of many matrices reach


def shape(call: Call) -> tuple[int, int, int]:
    """Matrices, rows and columns, of which there are no more than rows."""
    sizes = call.tensors[0].sizes
    return prod(sizes[:-2]), max(sizes[-2:]), min(sizes[-2:])


def law(call: Call, rates: Rates) -> Law:
    matrices, rows, columns = shape(call)
    part = OPS[call.name.removeprefix("aten::")]
    if call.name == "aten::linalg_qr" and "r" in call.inputs:
        part = R
    one = columns * (part.column + part.row * rows)
    flops = part.flops * rows * columns**2
    seconds = one + (matrices - 1) * (flops / (SHARE * rates.rate("float32")) if part.batched else one)
    return Law(rates.floor + seconds, matrices * flops, 2.0 * call.tensors[0].nbytes)


def features(call: Call, law: Law) -> list[float]:
    return [ln(law.seconds), *(ln(n) for n in shape(call))]


FAMILY = KernelFamily("factorize", frozenset(f"aten::{name}" for name in OPS), law, features, computes=True)
