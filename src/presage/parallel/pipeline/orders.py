"""Which operation runs when on each stage of a pipeline, as arrays over all stages at once. No times.

An operation is F (forward), B (backward, or its input-gradient part) or W (its weight-gradient part) of one microbatch
through one chunk of layers. Every operation has a `moment`, a whole number: those of a stage run in its order, and
whatever an operation waits for has a smaller one. They are the times of a schedule whose operations are all as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "WHAT", "Moments", "Turns", "group_of", "moments", "turns"]

Ints = NDArray[np.int64]
KINDS = ("1f1b", "interleaved", "gpipe", "zero-bubble")
WHAT = "FBW"
UNIT = 4  # between two operations of a stage; what comes between them (weight gradients, messages) has room


@dataclass(frozen=True, eq=False)
class Turns:
    """The order in which forwards go through a stage. Backwards take the same turns, with the chunks the other way."""

    microbatch: Ints
    chunk: Ints
    back: Ints  # how many turns ago the same microbatch went through the chunk before


@dataclass(frozen=True, eq=False)
class Moments:
    """Of every [stage, turn]; `weight` is empty where backwards are not split."""

    forward: Ints
    backward: Ints
    weight: Ints


def group_of(kind: str, stages: int, microbatches: int, virtual: int) -> int:
    """How many microbatches go through a chunk before the next chunk's turn.

    As many as there are stages, or the next larger number that leaves no group smaller than the stages over: Megatron's
    own rule (microbatches % group is 0 or >= stages), without which stages would wait for each other in a circle.
    """
    if kind == "gpipe":
        return microbatches
    if virtual == 1:
        return 1
    if microbatches <= stages:
        return microbatches
    legal = (n for n in range(stages, microbatches + 1) if not microbatches % n or microbatches % n >= stages)
    return next(legal)


def turns(microbatches: int, virtual: int, group: int) -> Turns:
    """Group by group, in it chunk by chunk, in it microbatch by microbatch; the last group may be smaller."""
    turn = np.arange(microbatches * virtual)
    first = turn // (group * virtual) * group
    size = np.minimum(group, microbatches - first)
    chunk, place = np.divmod(turn - first * virtual, size)
    return Turns(first + place, chunk, size)


def moments(kind: str, stages: int, microbatches: int, virtual: int, group: int) -> Moments:
    """When each operation has its turn."""
    turn, stage = np.arange(microbatches * virtual)[None, :], np.arange(stages)[:, None]
    both = _gpipe if kind == "gpipe" else _alternating if virtual == 1 else _interleaved
    forward, backward = both(stage, turn, stages, microbatches, virtual, group)
    weight = np.empty((stages, 0), np.int64)
    if kind == "zero-bubble":  # a stage's weight gradients lag as many backwards behind as there are stages before it
        _, later = both(stage, turn + stage, stages, microbatches, virtual, group)
        weight = later + 1
    return Moments(forward, backward, weight)


def _alternating(stage: Ints, turn: Ints, stages: int, *_: int) -> tuple[Ints, Ints]:
    """Each stage runs as many forwards ahead as there are stages behind it, then forwards and backwards in turn."""
    return UNIT * (stage + 2 * turn), UNIT * (2 * stages - 1 - stage + 2 * turn)


def _interleaved(stage: Ints, turn: Ints, stages: int, _: int, virtual: int, group: int) -> tuple[Ints, Ints]:
    """Ahead by 2 forwards for every stage behind, and by a group for every chunk but one."""
    stretch = np.maximum(stages - group, 0) * (turn // group)  # fewer microbatches than stages: there is one group
    ahead = 2 * (stages - 1) + (virtual - 1) * max(stages, group)
    forward, backward = turn + stretch + stage, turn + stretch + ahead - stage
    return 2 * UNIT * forward, 2 * UNIT * backward + UNIT


def _gpipe(stage: Ints, turn: Ints, stages: int, microbatches: int, virtual: int, _: int) -> tuple[Ints, Ints]:
    """All forwards, then all backwards."""
    chunk, microbatch = np.divmod(turn, microbatches)
    wave = 2 * microbatch + 2 * max(microbatches, stages) * chunk
    last = 2 * max(microbatches, stages) * virtual + stages
    return UNIT * (stage + wave), UNIT * (last + stages - 1 - stage + wave)
