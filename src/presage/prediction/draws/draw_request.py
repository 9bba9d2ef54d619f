"""`draw(shape, noise) -> Draws`: step times of many runs of a job, some steps of each; `draw_all`: of many such pairs.

The work is cut into pieces that a pool may do anywhere: a block of the draws, of those pairs whose slowest replicas are
the same. What is random in a piece depends on the seed, the block and the source of noise alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from presage.noise.model import NoiseModel
from presage.noise.sampling import RandomStreams
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.draw import (
    STEPS,
    Block,
    Draws,
    blocks_of,
    join_blocks,
    replicas_key,
    slowest_replicas,
    transfers_vary,
    whole_steps,
)
from presage.prediction.draws.step_model import StepModel

__all__ = ["DrawRequest", "draw", "draw_all"]

MOST = 16_000_000  # steps that are held at once


@dataclass(frozen=True, eq=False)
class DrawRequest:
    """What is to be drawn: some `steps` of each of count / steps runs."""

    shape: StepModel
    noise: NoiseModel
    count: int = 10_000
    steps: int = STEPS


class _Piece(NamedTuple):
    """A block of some that were asked for, by number."""

    some: tuple[int, ...]
    block: int


def draw(
    shape: StepModel, noise: NoiseModel, seed: int = 0, count: int = 10_000, steps: int = STEPS, pool: Pool = THREADS_2
) -> Draws:
    """Some `steps` of each of count / steps runs. The same seed gives each source of noise the same draws, whatever the
    others are: two plans, or one with a source less, can be compared draw by draw."""
    return next(draw_all([DrawRequest(shape, noise, count, steps)], seed, pool))[1]


def draw_all(asked: Sequence[DrawRequest], seed: int = 0, pool: Pool = THREADS_2) -> Iterator[tuple[int, Draws]]:
    """Each with its number, those whose slowest replicas are the same together."""
    for a in asked:
        if transfers_vary(a.noise):
            a.shape.curves  # noqa: B018 - here, once, and not in every piece
    parts = list(_parts(asked))
    pieces = [_Piece(some, k) for some in parts for k in range(_blocks(asked[some[0]]))]
    found = pool.map(partial(_drawn, asked, seed), pieces)
    for some in parts:
        blocks = [next(found) for _ in range(_blocks(asked[some[0]]))]
        for i, of_one in zip(some, zip(*blocks, strict=True), strict=True):
            yield i, join_blocks(asked[i].shape, of_one)


def _parts(asked: Sequence[DrawRequest]) -> Iterator[tuple[int, ...]]:
    """Those that share their slowest replicas, as many of them as can be held."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, a in enumerate(asked):
        alike.setdefault((a.count, a.steps, *replicas_key(a.shape, a.noise)), []).append(i)
    for some in alike.values():
        many = max(1, MOST // asked[some[0]].count)
        yield from (tuple(some[i : i + many]) for i in range(0, len(some), many))


def _blocks(a: DrawRequest) -> int:
    return blocks_of(a.count, a.steps)[0]


def _drawn(asked: Sequence[DrawRequest], seed: int, piece: _Piece) -> list[Block]:
    first, streams = asked[piece.some[0]], RandomStreams(seed).child(piece.block)
    longest = slowest_replicas(first.shape, first.noise, streams, blocks_of(first.count, first.steps)[1])
    return [whole_steps(asked[i].shape, asked[i].noise, streams, longest) for i in piece.some]
