"""Steps that differ at random, for numbers drawn on the host decide what they run: layers left out, lengths drawn.

Several are looked at, and the one whose work is nearest to their mean is predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from ctypes import string_at
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

FEW, MANY = 3, 16  # steps that are looked at besides one that draws numbers; and where they differ


class StepWork(NamedTuple):
    """What a stretch of the run did on the GPU."""

    kinds: int  # a hash of its ops and their shapes
    ops: int
    elements: int  # of the ops' inputs


def joined(parts: Sequence[StepWork]) -> StepWork:
    """A step of several parts."""
    return StepWork(hash(tuple(p.kinds for p in parts)), sum(p.ops for p in parts), sum(p.elements for p in parts))


def random_state() -> tuple[Any, ...]:
    """The states of Python's, NumPy's and PyTorch's random generators on the host."""
    arrays: Any = np.random.get_state()
    _, keys, *rest = arrays
    tensors = torch.get_rng_state()
    return random.getstate(), (keys.tobytes(), *rest), string_at(tensors.data_ptr(), tensors.nbytes)  # no op of PyTorch


def set_random_state(state: tuple[Any, ...]) -> None:
    python, (keys, *rest), tensors = state
    random.setstate(python)
    np.random.set_state(("MT19937", np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(tensors), dtype=torch.uint8))


def nearest(looked: Sequence[StepWork]) -> int:
    """The place of the step whose work is nearest to the mean."""
    return int(np.abs(_off_mean(looked)).argmin())


def is_near_mean(work: StepWork, looked: Sequence[StepWork]) -> bool:
    """Whether this one of the steps is among the quarter nearest to their mean."""
    off = np.abs(_off_mean(looked))
    return bool(off[looked.index(work)] <= np.quantile(off, 0.25))


def _off_mean(looked: Sequence[StepWork]) -> npt.NDArray[np.float64]:
    """How far the work of each is from their mean, over that mean."""
    works = np.array([w.elements for w in looked], np.float64)
    return np.asarray(works / max(works.mean(), 1.0) - 1)


def largest(looked: Sequence[StepWork], work: StepWork) -> float:
    """The work of the largest of the steps over that of this one."""
    return max(w.elements for w in looked) / max(work.elements, 1)


def differ(looked: Sequence[StepWork]) -> str:
    """By how much these steps differ; empty where they are alike."""
    if len(set(looked)) == 1:
        return ""
    ops, off = [w.ops for w in looked], _off_mean(looked)
    kinds = f"{min(ops):,} to {max(ops):,} GPU ops" if len(set(ops)) > 1 else "in shapes or kinds of ops"
    return f"{kinds}, work {off.min():+.1%} to {off.max():+.1%} of their mean"
