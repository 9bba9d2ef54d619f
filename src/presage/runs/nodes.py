"""Nodes of many drawn runs at once: which are in repair, which stand by, and how often those in use fail."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Spares:
    """When each failed node (or replica) returns.

    A run needs all its nodes. With n spares it goes on while at most n nodes are away; one more, and it waits for the
    first of these n + 1. None: there is always a spare.
    """

    def __init__(self, spares: int | None, draws: int) -> None:
        self.back = None if spares is None else np.full((draws, spares + 1), -np.inf)

    def only(self, keep: Bools) -> Spares:
        """The spares of a subset of the draws."""
        out = Spares(None, 0)
        out.back = None if self.back is None else self.back[keep]
        return out

    def wait(self, lost: Bools, now: Floats, away: Floats) -> Floats:
        """Seconds that each draw which loses a node now waits for one."""
        waits = np.zeros(len(now))
        rows = np.flatnonzero(lost)
        if self.back is None or not len(rows):
            return waits
        self.back[rows, self.back[rows].argmin(axis=1)] = now[rows] + away[rows]
        waits[rows] = np.maximum(0.0, self.back[rows].min(axis=1) - now[rows])
        return waits

    def missing(self, now: Floats, seconds: Floats) -> Floats:
        """How many are away on average over the next so many seconds."""
        if self.back is None:
            return np.zeros(len(now))
        span = np.maximum(seconds, 1e-9)[:, None]
        with np.errstate(invalid="ignore"):
            share = np.where(np.isfinite(span), np.clip(self.back - now[:, None], 0.0, span) / span, 0.0)
        return np.asarray(share.sum(axis=1))


class Standby:
    """Hot standby nodes: one takes a failed node's place at once; its own place is filled some time later."""

    def __init__(self, nodes: int, draws: int) -> None:
        self.back = np.full((draws, nodes), -np.inf)

    def only(self, keep: Bools) -> Standby:
        out = Standby(0, 0)
        out.back = self.back[keep]
        return out

    def take(self, lost: Bools, now: Floats, filled: Floats) -> Bools:
        """The draws that had one ready for the node they lose now."""
        hit = np.zeros(len(now), bool)
        rows = np.flatnonzero(lost)
        if not self.back.shape[1] or not len(rows):
            return hit
        first = self.back[rows].argmin(axis=1)
        ready = self.back[rows, first] <= now[rows]
        hit[rows[ready]] = True
        self.back[rows[ready], first[ready]] = now[rows[ready]] + filled[rows[ready]]
        return hit


class RepeatOffenders:
    """Nodes by how often they failed, where those that did are more likely to do so again.

    A node's own rate is gamma-distributed with mean 1 and variance v. After an exposure L (expected failures of an
    average node) and n failures it is expected at (1/v + n) / (1/v + L). Counts of nodes by n are all there is to
    know. An evicted node is replaced by one of which nothing is known (rate 1).
    """

    def __init__(self, nodes: float, variance: float, evict: int, draws: int) -> None:
        self.shape, self.evict, self.nodes = 1 / variance, evict, nodes
        self.counts = np.zeros((draws, evict + 1))  # failed 0, 1, ... times; the last column: replacements
        self.counts[:, 0] = nodes
        self.exposure = np.zeros(draws)

    def only(self, keep: Bools) -> RepeatOffenders:
        out = RepeatOffenders(self.nodes, 1 / self.shape, self.evict, 0)
        out.counts, out.exposure = self.counts[keep], self.exposure[keep]
        return out

    @property
    def rates(self) -> Floats:
        """[draw, group]: rate of all nodes of a group, in those of an average node."""
        known = (self.shape + np.arange(self.evict)) / (self.shape + self.exposure[:, None])
        return np.asarray(self.counts * np.concatenate([known, np.ones((len(known), 1))], axis=1))

    @property
    def factor(self) -> Floats:
        """Rate of a draw's nodes over that of as many average ones."""
        return np.asarray(self.rates.sum(axis=1) / self.nodes)

    def fail(self, failed: Bools, even: Floats, exposure: Floats) -> None:
        """Let one node fail in each of these draws, `even` uniform, after so much more exposure."""
        self.exposure = self.exposure + exposure
        rows = np.flatnonzero(failed)
        if not len(rows):
            return
        below = np.cumsum(self.rates[rows], axis=1)
        group = (below < (even[rows] * below[:, -1])[:, None]).sum(axis=1)
        last = self.evict
        self.counts[rows, group] -= 1
        self.counts[rows, np.where(group >= last - 1, last, group + 1)] += 1
