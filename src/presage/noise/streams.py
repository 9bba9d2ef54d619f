"""Random numbers by name: each source of noise has a stream of its own, so that leaving one out moves no other."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

__all__ = ["Streams"]


@dataclass(frozen=True)
class Streams:
    """Generators of one seed; blocks of draws have streams of their own."""

    seed: int = 0
    block: int = 0

    def child(self, block: int) -> Streams:
        """The streams of a block."""
        return Streams(self.seed, block)

    def __call__(self, name: str) -> np.random.Generator:
        """A generator that depends on the seed, the block and the name alone."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, self.block, crc32(name.encode()))))
