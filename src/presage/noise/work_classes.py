"""Classes of work by what names say: kernels, families of ops, and collectives with their groups."""

from __future__ import annotations

import re

KERNELS = (
    ("attention", re.compile(r"flash|fmha|attention|attn|mha_|sdpa", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|adagrad|sgd_|lamb_", re.IGNORECASE)),
    (
        "products",
        re.compile(r"gemm|gemv|cutlass|cublas|xmma|nvjet|Cijk|matmul|triton_mm|conv|wgrad|dgrad", re.IGNORECASE),
    ),
)
FAMILIES = {"matrix multiply": "products", "convolution": "products", "recurrent": "products"} | {
    "attention": "attention",
    "optimizer": "optimizer",
}
GROUPS = (  # what frameworks call the groups of ranks
    ("ep", re.compile(r"expert|\bep\b|(?<![a-z])ep(?![a-z])|moe", re.IGNORECASE)),
    ("cp", re.compile(r"context|(?<![a-z])cp(?![a-z])|ulysses|ring_att", re.IGNORECASE)),
    ("send", re.compile(r"pipe|(?<![a-z])pp(?![a-z])|p2p", re.IGNORECASE)),
    ("tp", re.compile(r"tensor|(?<![a-z])tp(?![a-z])|model.parallel", re.IGNORECASE)),
)
KINDS = (
    ("ep", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("sharding", re.compile(r"all_?gather|reduce_?scatter", re.IGNORECASE)),
    ("dp", re.compile(r"all_?reduce|broadcast", re.IGNORECASE)),
    ("send", re.compile(r"send|recv", re.IGNORECASE)),
)


def kernel_class(name: str) -> str:
    """The class of a kernel that is no collective."""
    return next((kind for kind, pattern in KERNELS if pattern.search(name)), "streams")


def family_class(family: str) -> str:
    """The class of a family of ops that is no communication."""
    return FAMILIES.get(family, "streams")


def transfer_class(kind: str, group: str = "") -> str:
    """The class of a collective: by the name of its group where that says it, else by its kind."""
    named = next((c for c, pattern in GROUPS if pattern.search(group)), None)
    return named or next((c for c, pattern in KINDS if pattern.search(kind)), "dp")
