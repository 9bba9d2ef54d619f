"""VisionTower: an encoder of images before a decoder, and the projector between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A stack of layers over an image's patches; groups of `merge` patches become a token of the decoder each."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    patches: int  # of an image
    images: float = 1.0  # of a sample
    merge: int = 1
    inputs: int = 588  # numbers of a patch: 3 x 14 x 14
    gated: bool = False
    window: int = 0  # patches that see each other; 0: all of an image
    full_every: int = 0  # with a window, every so many layers see all
    extra: int = 0  # parameters besides: positions, a class token, norms before and after
    frozen: bool = True  # not trained: no backward pass

    @property
    def tokens(self) -> float:
        """Tokens of the decoder's sequence that stand for images."""
        return self.images * self.patches / self.merge

    def parameters(self, decoder: int) -> int:
        """With the projector: two layers, the first as wide as the merged patches or as the decoder."""
        h = self.hidden
        attention = 4 * h * h + 4 * h
        feed = (3 if self.gated else 2) * h * self.ffn + (2 if self.gated else 1) * self.ffn + h
        norms = 2 * h if self.gated else 4 * h
        return self.layers * (attention + feed + norms) + self.inputs * h + self.extra + self.projector(decoder)

    def projector(self, decoder: int) -> int:
        """Parameters between the tower and the decoder."""
        wide = self.hidden * self.merge
        inner = wide if self.merge > 1 else decoder
        return wide * inner + inner + inner * decoder + decoder
