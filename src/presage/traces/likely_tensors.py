"""Which tensor an op of a profiler's trace most likely got: the trace has shapes and dtypes, and no identities.

What an op reads was made, read or saved before by one that had as many elements of its dtype: in the forward pass the
latest, in the backward pass first what the forward op of the same number had. It tells how long ago memory was used
last, thus what is still in the GPU's cache; it does not tell how much memory is in use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from presage.traces.execution_graph import Argument, TensorRef, tensors

Key: TypeAlias = tuple[int, str]
KEPT = 16  # of as many elements of a dtype, the latest that are remembered


class LikelyTensors:
    """The memory of tensors, as the ops come by in order."""

    def __init__(self, parameters: Sequence[TensorRef]) -> None:
        self.parameters: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
        for t in reversed(parameters):  # gradients come in the reverse order
            self.parameters[t.shape, t.dtype].append(t.storage)
        self._turn: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._recent: dict[Key, list[int]] = defaultdict(list)
        self._saved: dict[int, dict[Key, list[int]]] = {}

    def inputs(self, given: tuple[Argument, ...], backward: int) -> tuple[Argument, ...]:
        """The arguments of an op with the memory they most likely have; `backward` is autograd's number of the forward
        op that a backward op belongs to, else -1."""
        used: set[int] = set()
        saved = self._saved.get(backward, {})
        first = next(tensors(given), None)

        def one(value: Argument) -> Argument:
            if isinstance(value, tuple):
                return tuple(map(one, value))
            if not isinstance(value, TensorRef) or value.device == "cpu" or not value.elements:
                return value
            there = self._parameter(value) if backward < 0 else None
            known = [] if value is first else saved.get(_key(value), [])
            likely = [] if there is not None else [*reversed(self._recent[_key(value)])]
            storage = next((s for s in (there, *known, *likely) if s is not None and s not in used), value.storage)
            used.add(storage)
            return replace(value, storage=storage)

        return tuple(map(one, given))

    def _parameter(self, t: TensorRef) -> int | None:
        """A parameter of this shape; of several the next one, as layers take turns."""
        for shape in (t.shape, t.shape[::-1]):
            if found := self.parameters.get((shape, t.dtype)):
                self._turn[shape, t.dtype] += 1
                return found[(self._turn[shape, t.dtype] - 1) % len(found)]
        return None

    def note(self, inputs: Sequence[Argument], outputs: Sequence[Argument], forward: int) -> None:
        """An op has used these; `forward` is autograd's number of an op of the forward pass, else -1."""
        for t in (*tensors(inputs), *tensors(outputs)):
            recent = self._recent[_key(t)]
            if t.storage in recent:
                recent.remove(t.storage)
            recent.append(t.storage)
            del recent[:-KEPT]
            if forward >= 0:
                self._saved.setdefault(forward, defaultdict(list))[_key(t)].append(t.storage)


def _key(t: TensorRef) -> Key:
    return t.elements, t.dtype
