"""Kernel families, one a module: each states its law, its features, and which ops it is for."""

from presage.costs.families import (
    attention,
    conv,
    copy,
    embedding,
    gemm,
    index,
    norm,
    optimizer,
    pointwise,
    pool,
    random,
    reduce,
    rnn,
    softmax,
    sort,
)
from presage.costs.families.common import KernelFamily, Law

__all__ = ["BY_OP", "FAMILIES", "KernelFamily", "Law", "register_family"]

MODULES = (
    gemm, conv, attention, rnn, pointwise, copy, reduce, norm, softmax, embedding, index, sort, pool, random, optimizer,
)  # fmt: skip
FAMILIES: dict[str, KernelFamily] = {}
BY_OP: dict[str, KernelFamily] = {}


def register_family(family: KernelFamily) -> None:
    """Make a family known: its ops are timed by its law, and by its corrections where a GPU's models have them."""
    FAMILIES[family.name] = family
    BY_OP.update(dict.fromkeys(family.ops, family))


for module in MODULES:
    register_family(module.FAMILY)
