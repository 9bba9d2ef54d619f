"""Uneven all-to-alls: the even one that takes as long."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from presage.costs.collectives.group import Group
from presage.errors import PresageError

__all__ = ["even_bytes"]

Array = npt.NDArray[np.float64]


def even_bytes(sent: Array, group: Group) -> list[tuple[float, Group]]:
    """Even all-to-alls, bytes a rank and group, that each do what the busiest rank does here: the longest counts.

    Of totals (sent, received): one, of the most that any rank sends or receives. Of a matrix, with ranks of a domain
    side by side: one among the domains, and one within each.
    """
    n, near = group.ranks, group.per_domain
    if sent.shape not in ((n, n), (2, n)):
        raise PresageError(f"an uneven all-to-all of {n} ranks takes {n} x {n} or 2 x {n} bytes, not {sent.shape}")
    if not np.isfinite(sent).all() or (sent < 0).any():
        raise PresageError("an uneven all-to-all takes bytes, none negative")
    if n == 1:
        return [(0.0, group)]
    if sent.shape == (2, n) and n != 2:
        return [(float(sent.max()) * n / (n - 1), group)]
    domain = np.arange(n) // near
    inside = domain[:, None] == domain
    close = _busiest(sent, inside & ~np.eye(n, dtype=bool))
    within = Group(near, near)
    found = [(close * near / (near - 1), within)] if near > 1 else []
    return [*found, (_busiest(sent, ~inside) * n / (n - near), group)] if n > near else found


def _busiest(sent: Array, pairs: npt.NDArray[np.bool_]) -> float:
    """The most that one rank sends or receives among these pairs."""
    some = np.where(pairs, sent, 0.0)
    return float(max(some.sum(axis=0).max(), some.sum(axis=1).max()))
