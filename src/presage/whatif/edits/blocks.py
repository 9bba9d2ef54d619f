"""Blocks: the stretches of a forward pass that modules run, by the modules' names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from presage.errors import PresageError
from presage.graph.graph import Graph, Op

__all__ = ["around", "calls", "matching", "repeated"]


def calls(graph: Graph, modules: Iterable[str]) -> list[tuple[int, ...]]:
    """Each time one of these modules runs in the forward pass: the places of its ops."""
    names, found = set(modules), list[tuple[str, list[int]]]()
    running = ""
    for i, op in enumerate(graph.ops):
        if op.thread == "autograd" or op.phase != "forward":
            running = ""
            continue
        inside = next((m for m in around(op.module) if m in names), "")
        if inside and inside != running:
            found.append((inside, []))
        if inside:
            found[-1][1].append(i)
        running = inside
    return [tuple(ops) for _, ops in found]


def matching(graph: Graph, pattern: str) -> list[str]:
    """The outermost modules whose whole name, or the end of it after a dot, matches a regular expression."""
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise PresageError(f"{pattern!r} is not a regular expression: {e}") from e
    names = [m for m in _modules(graph.ops) if wanted.fullmatch(m) or wanted.fullmatch(m.rpartition(".")[2])]
    return _outermost(names or [m for m in _modules(graph.ops) if wanted.search(m)])


def repeated(graph: Graph) -> list[str]:
    """The outermost numbered siblings (blocks.0, blocks.1, ...) that hold modules of their own."""
    modules = _modules(graph.ops)
    parents = {m.rpartition(".")[0] for m in modules if "." in m}
    numbered = [m for m in modules if m.rpartition(".")[2].isdecimal() and m in parents]
    families = [m.rpartition(".")[0] for m in numbered]
    return _outermost([m for m, family in zip(numbered, families, strict=True) if families.count(family) > 1])


def _modules(ops: Iterable[Op]) -> list[str]:
    """All modules that run something in the forward pass, and those around them."""
    return list(dict.fromkeys(m for op in ops if op.phase == "forward" for m in around(op.module)))


def around(module: str) -> list[str]:
    """The module and those around it, outermost first."""
    parts = module.split(".") if module else []
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _outermost(modules: list[str]) -> list[str]:
    names = set(modules)
    return [m for m in modules if not names & set(around(m)[:-1])]
