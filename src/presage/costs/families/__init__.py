"""Kernel models, one family a module: each states its law, its features, and which ops it is for."""

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
from presage.costs.families.common import Family, Law

__all__ = ["BY_OP", "FAMILIES", "Family", "Law"]

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        gemm.FAMILY,
        conv.FAMILY,
        attention.FAMILY,
        rnn.FAMILY,
        pointwise.FAMILY,
        copy.FAMILY,
        reduce.FAMILY,
        norm.FAMILY,
        softmax.FAMILY,
        embedding.FAMILY,
        index.FAMILY,
        sort.FAMILY,
        pool.FAMILY,
        random.FAMILY,
        optimizer.FAMILY,
    )
}
BY_OP: dict[str, Family] = {op: f for f in FAMILIES.values() for op in f.ops}
