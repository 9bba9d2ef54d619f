"""Kernel families, one a module: each states its law, its features, and which ops it is for. How far each is off on
draws that were held out: docs/kernels.md."""

from importlib import import_module

from presage.costs.families.common import KernelFamily, Law

__all__ = ["BY_OP", "FAMILIES", "KernelFamily", "Law", "register_family"]

MODULES = (
    "gemm", "conv", "attention", "rnn", "pointwise", "copy", "reduce", "scan", "norm", "softmax", "embedding", "index",
    "sort", "pool", "resample", "fft", "grouped", "random", "optimizer", "factorize",
)  # fmt: skip
FAMILIES: dict[str, KernelFamily] = {}
BY_OP: dict[str, KernelFamily] = {}


def register_family(family: KernelFamily) -> None:
    """Make a family known: its ops are timed by its law, and by its corrections where a GPU's models have them. One of
    the same name is replaced."""
    for op in FAMILIES[family.name].ops if family.name in FAMILIES else ():
        BY_OP.pop(op, None)
    FAMILIES[family.name] = family
    BY_OP.update(dict.fromkeys(family.ops, family))


for _module in MODULES:
    register_family(import_module(f"{__name__}.{_module}").FAMILY)
