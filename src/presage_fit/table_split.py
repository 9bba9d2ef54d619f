"""Which shapes of published kernel tables models are fitted on: told by the shape alone, so of any table of the like.

A fifth of the pairs of widths (n, k) of products and of the triples (batch, heads, key heads) of attention is held out
whole, whatever the tokens. Of the other shapes one in four is fitted on. All others are unseen: those of widths that
were never fitted, which is harder, and those between fitted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from zlib import crc32

HELD, FITTED = 5, 4  # one in so many
WIDTHS: Final = {"gemm": (1, 2), "attention": (0, 2, 3)}  # where they stand in a table's sizes


def held_out_widths(kernel: str, sizes: Sequence[int]) -> bool:
    """Whether nothing with these widths was fitted."""
    return _hash([sizes[i] for i in WIDTHS[kernel]]) % HELD == 0


def is_fitted(kernel: str, sizes: Sequence[int]) -> bool:
    return not held_out_widths(kernel, sizes) and _hash(sizes) % FITTED == 0


def _hash(sizes: Sequence[int]) -> int:
    return crc32(repr(tuple(int(n) for n in sizes)).encode())
