"""Optimizers that iterate within a step until they have converged, which a capture cannot see: all iterations run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


class _Never:
    """A tolerance that nothing is below. What is compared with it is still computed and read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> bool:
        del types, kwargs
        bool(func(*(-math.inf if isinstance(x, cls) else x for x in args)))
        return False

    def __neg__(self) -> _Never:
        return self

    def __gt__(self, other: Any) -> bool:
        return False


def all_iterations(note: Callable[[str], None]) -> Callable[..., Any]:
    """`LBFGS.step`, whose tolerances do not end it."""
    step: Any = torch.optim.LBFGS.step

    @wraps(step)
    def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        group = optimizer.param_groups[0]
        given = {name: group[name] for name in ("tolerance_grad", "tolerance_change")}
        note(f"LBFGS is taken to run all of its {group['max_iter']} iterations, which its tolerances may end")
        group.update(dict.fromkeys(given, _Never()))
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            group.update(given)

    return run
