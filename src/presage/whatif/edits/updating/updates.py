"""Updates: what an optimizer does to each parameter, read from the ops it runs.

An optimizer's ops, a list's taken apart, fall into one chain for each parameter: those that touch its memory, its
gradient's, its state's and what is made from them. A chain spelt as a line of words (`p` the parameter, `g` its
gradient or what became of it, `s` state, `t` made on the way, `0` the step count and numbers made from it) names the
algorithm: `mul(s) add(s,g) add(p,s)` is SGD with momentum. A chain that no pattern takes whole is some other optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from presage.graph.graph import Graph, Op
from presage.whatif.edits.updating.lanes import FOREACH, FUSED, Key, Part, chains, key, parts

__all__ = ["Algorithm", "Update", "read"]

Algorithm: TypeAlias = Literal["adam", "sgd", "adagrad", "rmsprop", "sparse", "unknown"]

_BEGIN = r"(?P<maximize>neg\(g\) )?(?P<decay>add\(g,p\) )?"
PATTERNS: dict[Algorithm, str] = {
    "adam": _BEGIN + r"(?P<decoupled>mul\(p\) )?(lerp\(s,g\) |mul\(s\) add\(s,g\) )mul\(s\) addcmul\(s,g,g\) "
    r"(?P<amsgrad>maximum\(s,s(,s)?\) (copy\(s,t\) )?)?"
    r"sqrt\(s\) div\(t(,0)?\) add\(t(,0)?\) (div\(t,0\) )?addcdiv\(p,s,t\) ",
    "sgd": _BEGIN + r"(?P<momentum>mul\(s\) add\(s,g\) (?P<nesterov>add\(g,s\) (?=add\(p,g\)))?)?add\(p,[gs]\) ",
    "adagrad": _BEGIN + r"addcmul\(s,g,g\) sqrt\(s\) add\(t\) (mul\(g\) )?addcdiv\(p,[gt],t\) ",
    "rmsprop": _BEGIN + r"mul\(s\) addcmul\(s,g,g\) "
    r"((?P<centered>lerp\(s,g\) addcmul\(s,s,s\) )sqrt\(t\) |sqrt\(s\) )add\(t\) "
    r"((?P<momentum>mul\(s\) addcdiv\(s,g,t\) )add\(p,s\) |addcdiv\(p,g,t\) )",
}  # fmt: skip
SPARSE = re.compile(r"[(,]x[,)]|index_add\(p,")  # a gradient that holds some rows only


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's update. `states` are those that the algorithm has, in the order of its fused form."""

    algorithm: Algorithm
    flags: frozenset[str]  # 'decay', 'maximize', 'momentum', ...
    scalars: tuple[tuple[str, float], ...]  # by word
    foreach: bool
    parameter: int
    gradient: int
    states: tuple[int, ...]
    step: int | None  # its step count, where that is on the GPU
    places: tuple[int, ...]  # the ops it is part of

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for updates that one group of parameters has."""
        return self.algorithm, self.flags, self.scalars, self.foreach, self.places[-1] if self.foreach else None

    def scalar(self, word: str, default: float = 0.0, nth: int = 0) -> float:
        """The number in a word's op."""
        found = [value for w, value in self.scalars if w == word]
        return found[nth] if nth < len(found) else default


def read(graph: Graph) -> list[Update]:
    """The updates of a step that no fused op makes, in the order in which they end."""
    all_chains = chains(graph, [p for i, op in enumerate(graph.ops) if _counts(op) for p in parts(graph, i, op)])
    found = [_update(graph, chain) for chain in all_chains]
    updates = sorted((u for u in found if u is not None), key=lambda u: u.places[-1])
    return _with_steps(updates, [c[0] for c in all_chains if len(c) == 1 and _step(graph, c) is not None])


def _with_steps(updates: list[Update], steps: Sequence[Part]) -> list[Update]:
    """RMSprop's step counts, which it keeps and never looks at, go with its updates in their order."""
    takers = [u for u in updates if u.algorithm == "rmsprop"]
    if len(takers) != len(steps):
        return updates
    given = {
        u.parameter: replace(u, step=s.operands[0], places=tuple(sorted({*u.places, s.place})))
        for u, s in zip(takers, steps, strict=True)
    }
    return [given.get(u.parameter, u) for u in updates]


def _counts(op: Op) -> bool:
    return op.phase == "optimizer" and op.kernels and not op.name.startswith(FUSED)


def _update(graph: Graph, chain: Sequence[Part]) -> Update | None:
    """A chain as an update; None if it has no gradient in it."""
    gradient = next((t for p in chain for t in p.operands if _role(graph, t) == "gradient"), None)
    if gradient is None:
        return None
    step = _step(graph, chain)
    words = list(_words(graph, chain, step))
    algorithm, flags = _recognised("".join(f"{word} " for word, _ in words))
    return Update(
        algorithm,
        flags,
        tuple((word, part.scalar) for word, part in words if part.scalar is not None),
        graph.ops[chain[-1].place].name.startswith(FOREACH),
        words[-1][1].operands[0],
        gradient,
        _states(algorithm, words),
        step,
        tuple(sorted({p.place for p in chain})),
    )


def _recognised(line: str) -> tuple[Algorithm, frozenset[str]]:
    for algorithm, pattern in PATTERNS.items():
        if found := re.fullmatch(pattern, line):
            return algorithm, frozenset(name for name, text in found.groupdict().items() if text)
    return ("sparse" if SPARSE.search(line) else "unknown"), frozenset()


def _role(graph: Graph, tensor: int) -> str:
    return graph.storages[graph.tensors[tensor].storage].role


def _step(graph: Graph, chain: Sequence[Part]) -> int | None:
    """The step count: a single number among the states, to which 1 is added."""
    for p in chain:
        if p.stem == "add" and len(p.operands) == 1 and p.scalar == 1 and not graph.tensors[p.operands[0]].shape:
            return p.operands[0] if _role(graph, p.operands[0]) == "optimizer" else None
    return None


_LETTERS = {"parameter": "p", "gradient": "g", "optimizer": "s", "activation": "t", "input": "p", "buffer": "p"}
_STILL_GRADIENT = {"neg(g)", "add(g,p)", "add(g,s)"}


def _words(graph: Graph, chain: Sequence[Part], step: int | None) -> Iterator[tuple[str, Part]]:
    """The chain in words; what is done to step counts alone is left out."""
    known: dict[Key, str] = {} if step is None else {key(graph, step): "0"}
    for part in chain:
        letters = [known.setdefault(key(graph, t), _letter(graph, t)) for t in part.operands]
        word = f"{part.stem}({','.join(letters)})"
        still = set(letters) == {"0"}
        if part.output is not None:
            known[key(graph, part.output)] = "0" if still else "g" if word in _STILL_GRADIENT else "t"
        if not still:
            yield word, part


def _letter(graph: Graph, tensor: int) -> str:
    t = graph.tensors[tensor]
    letter = _LETTERS.get(_role(graph, tensor), "?")
    return "x" if letter == "g" and len(t.strides) < len(t.shape) else letter


_STATES: dict[Algorithm, tuple[str, ...]] = {
    "adam": (r"lerp\(s,g\)|add\(s,g\)", r"addcmul\(s,g,g\)", r"maximum\(.*\)"),
    "sgd": (r"add\(s,g\)",),
    "adagrad": (r"addcmul\(s,g,g\)",),
    "rmsprop": (r"addcmul\(s,g,g\)", r"lerp\(s,g\)", r"addcdiv\(s,g,t\)"),
}


def _states(algorithm: Algorithm, words: Sequence[tuple[str, Part]]) -> tuple[int, ...]:
    """The states an algorithm writes, told by the words that write them."""
    found = [
        next((part.operands[0] for word, part in words if re.fullmatch(writer, word)), None)
        for writer in _STATES.get(algorithm, ())
    ]
    return tuple(f for f in found if f is not None)
