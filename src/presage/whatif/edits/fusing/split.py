"""When a reduction takes two kernels: too few results to keep a GPU busy, each of many elements.

The rules are Inductor's (`InductorChoices.reduction_split_factor`), for a GPU of 132 SMs.
"""

from __future__ import annotations

from math import ceil

__all__ = ["SMS", "splits"]

SMS, THREADS = 132, 2048
LEAST, MOST = 32, 512  # elements a thread
ACROSS, DOWN = 256, 4  # threads that share a result: along a row, down a column
SHORT = 8192  # a row so long is one block's work


def splits(rows: int, columns: int, down: bool) -> int:
    """Into how many parts each result's elements are cut; 1: one kernel does it all."""
    if columns <= LEAST or rows >= SMS * 2 * 32:
        return 1
    if not down and (rows >= 2 * SMS or columns <= SHORT):
        return 1
    return max(1, ceil(columns / ((DOWN if down else ACROSS) * _each(rows, columns, down))))


def _each(rows: int, columns: int, down: bool) -> int:
    """Elements that one thread takes."""
    if rows * columns < LEAST * SMS * THREADS:
        return LEAST
    if rows * columns >= MOST * SMS * THREADS:
        return MOST
    blocks = SMS * THREADS // ACROSS
    if down:
        return max(LEAST, ceil(columns / (DOWN * ceil(blocks / ceil(rows / 128)))))
    return max(LEAST, ceil(columns / (ACROSS * ceil(blocks / 2 / rows))))
