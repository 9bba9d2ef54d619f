"""Units of a model: the repeated blocks that sharded parallelism gathers and frees one at a time, and the rest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from presage.graph.check import uses
from presage.graph.graph import Graph, Storage
from presage.parallel.gradients import backward_passes, parameters

__all__ = ["ROOT", "Unit", "unit_of", "units"]

ROOT = ""
PHASES = ("forward", "backward")
Span = tuple[int, int]


@dataclass(frozen=True)
class Unit:
    """Parameters that come and go together, and the first and last op that needs them, by backward pass."""

    name: str
    parameters: tuple[Storage, ...]
    forward: tuple[Span | None, ...]
    backward: tuple[Span | None, ...]


def units(graph: Graph) -> list[Unit]:
    """The root (all that is in no block) and then the blocks, in the order of their first use."""
    blocks = _blocks(p.module for p in parameters(graph))
    members: dict[str, list[Storage]] = {ROOT: []}
    for p in parameters(graph):
        members.setdefault(unit_of(p.module, blocks), []).append(p)
    needs = _needs(graph, {p.id: name for name, some in members.items() for p in some}, blocks)
    passes = range(len(backward_passes(graph)))
    found = [
        Unit(name, tuple(some), *(tuple(needs.get((name, phase, k)) for k in passes) for phase in PHASES))
        for name, some in members.items()
        if some
    ]
    used = [u for u in found if u.forward[0] is not None]
    return sorted(used, key=lambda u: (u.name != ROOT, u.forward[0]))


def unit_of(module: str, blocks: set[str]) -> str:
    """The block a module is in: 'blocks.3' for 'blocks.3.attn.qkv'."""
    parts = module.split(".")
    return next((b for n in range(1, len(parts) + 1) if (b := ".".join(parts[:n])) in blocks), ROOT)


def _blocks(modules: Iterable[str]) -> set[str]:
    """Numbered modules with modules of their own inside, of which there are several side by side: the outermost."""
    found: dict[str, set[str]] = {}
    for module in modules:
        parts = module.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None and number + 1 < len(parts):
            found.setdefault(".".join(parts[:number]), set()).add(".".join(parts[: number + 1]))
    return {block for some in found.values() if len(some) > 1 for block in some}


def _needs(graph: Graph, owner: dict[int, str], blocks: set[str]) -> dict[tuple[str, str, int], Span]:
    """First and last op of each unit by phase and pass: those of its modules, and those that use its parameters."""
    ends = [backward[-1] for backward in backward_passes(graph)]
    out: dict[tuple[str, str, int], Span] = {}
    for i, op in enumerate(graph.ops[: ends[-1] + 1]):
        if op.phase not in PHASES:
            continue
        names = {owner[s] for s in uses(graph, op) if s in owner}
        if op.kernels and op.module and (block := unit_of(op.module, blocks)) != ROOT:
            names.add(block)
        for name in names:
            key = name, op.phase, bisect_left(ends, i)
            out[key] = out.get(key, (i, i))[0], i
    return out
