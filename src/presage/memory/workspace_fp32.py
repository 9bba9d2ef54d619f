"""The scratch memory of float32 convolutions without TF32, by rules.

Their kernels read channels-first tensors. Tensors in the other layout are copied into the workspace. The rest are the
algorithms' own buffers: Winograd and Fourier transforms. Which algorithm is taken only cuDNN knows, so this part is a
bounded model; the sizes, given the algorithm, are exact. Rules, for these transforms are rare and large: trees fitted
to drawn convolutions (`presage.memory.workspace_trees`) miss them where batches are large and images middle-sized.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod

from presage.graph.graph import Tensor

WHOLE_LIMIT = 3_400_000_000  # no transform of whole images was seen to take more; larger than 32, no more than 2.6 GB
WHOLE_LIMIT_LARGE = 2_600_000_000
WINOGRAD = 36  # values of a transformed 6 x 6 tile, which makes 4 x 4 outputs


@dataclass(frozen=True, slots=True)
class ConvShape:
    """One convolution: `channels` in, `filters` out, and the layout of its tensors."""

    batch: int
    channels: int
    filters: int
    area_in: int
    area_out: int
    kernel: tuple[int, ...]
    groups: int
    itemsize: int
    channels_last: bool
    strided: bool

    @property
    def pointwise(self) -> bool:
        return prod(self.kernel) == 1

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels

    @property
    def input_bytes(self) -> int:
        return self.batch * self.channels * self.area_in * self.itemsize

    @property
    def output_bytes(self) -> int:
        return self.batch * self.filters * self.area_out * self.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.filters * self.channels // self.groups * prod(self.kernel) * self.itemsize

    @property
    def copies(self) -> int:
        """The tensors in the layout the kernel reads; a pointwise weight is the same in both."""
        return self.input_bytes + self.output_bytes + (0 if self.pointwise else self.weight_bytes)


def forward(s: ConvShape) -> int:
    """Scratch of a forward convolution."""
    if s.depthwise:
        return 0
    if s.dims == 3 and s.groups > 1:  # a group at a time, each with its own copy of its part of input and output
        return s.input_bytes + s.output_bytes
    return (s.copies if s.channels_last and s.channels >= 32 else 0) + _forward_fourier(s)


def data(s: ConvShape) -> int:
    """Scratch of the input's gradient."""
    return 0 if s.depthwise else (s.copies if s.channels_last else 0) + _fourier(s)


def weight(s: ConvShape) -> int:
    """Scratch of the weight's gradient."""
    if s.depthwise:
        return 0
    copies = s.copies if s.channels_last and s.channels >= 32 else 0
    if _winograd_fits(s):
        return copies + _winograd(s)
    return copies or (s.copies if s.groups == 1 and _many_short_sums(s) else 0)


def _many_short_sums(s: ConvShape) -> bool:
    """Whether a float32 weight gradient is computed channels-last even without tensor cores.

    That kernel gives every 32 x 32 tile of the gradient one thread block, which sums over all images alone: it is taken
    where there are many tiles and the sums are short. The other one shares the images out and needs no scratch.
    """
    tiles = -(-s.filters // 32) * -(-s.channels * prod(s.kernel) // 32)
    return s.channels >= 32 and s.batch * s.area_out < 100 * tiles


def _fourier(s: ConvShape) -> int:
    """The tiled FFT that float32 input gradients take for images of 28 and more: weights, and two tiles an image."""
    side, pairs = isqrt(s.area_out), s.channels * s.filters
    square = s.channels == s.filters
    if s.strided or s.groups > 1 or max(s.kernel) not in (3, 5) or side < 28 or s.channels < 32:
        return 0
    if pairs > (512 * 512 if square else 128 * 256) or (s.batch < 16 and not (square and side > 28)):
        return 0
    tiles = 1 if side <= 30 else 2
    return _spectrum(32) * (pairs + s.batch * (s.channels + s.filters) * tiles)


def _forward_fourier(s: ConvShape) -> int:
    """The whole-image FFT of float32 convolutions: spectra of weights and images, each twice, and flipped weights."""
    if not _takes_whole_fourier(s):
        return 0
    side = isqrt(s.area_out)
    size = 16 if side <= 14 else 32 if side <= 30 else 64
    nbytes = _spectrum(size) * 2 * (s.channels * s.filters + s.batch * s.channels) + s.weight_bytes
    return nbytes if nbytes <= (WHOLE_LIMIT if side <= 32 else WHOLE_LIMIT_LARGE) else 0


def _takes_whole_fourier(s: ConvShape) -> bool:
    """Large batches of small and middle-sized images; channels that are at least halved, in batches of any size.

    This gets all but 8 right of 159 shapes that were seen, 36 of which took it. Only one of them halved its channels.
    """
    side = isqrt(s.area_out)
    if not _winograd_fits(s) or min(s.channels, s.filters) < 64 or not 7 <= side <= 56:
        return False
    if s.channels != s.filters and (s.channels_last or side <= 30):
        return False
    if s.channels >= 2 * s.filters:
        return True
    if side > 32:
        return s.channels == s.filters >= 128 and s.batch >= 16
    enough = 24 if side > 30 and s.channels == s.filters else 32
    return s.batch >= enough and s.batch * s.channels * s.area_out >= 2_000_000 and s.filters <= 2 * s.channels


def _spectrum(side: int) -> int:
    """Bytes of a real square tile after its Fourier transform: half of it, in complex numbers of 8 bytes."""
    return side * (side // 2 + 1) * 8


def _winograd_fits(s: ConvShape) -> bool:
    return s.kernel == (3, 3) and not s.strided and s.groups == 1 and min(s.channels, s.filters) >= 32


def _winograd(s: ConvShape) -> int:
    side = -(-isqrt(s.area_out) // 4)
    return WINOGRAD * 4 * (s.batch * (s.channels + s.filters) * side * side + s.channels * s.filters)


def shape(x: Tensor, weight: Tensor, y: Tensor) -> ConvShape:
    transposed = weight.shape[0] != y.shape[1]
    if transposed:  # a transposed convolution is another one's input gradient
        x, y = y, x
    area_in, area_out = prod(x.shape[2:]), prod(y.shape[2:])
    return ConvShape(
        batch=x.shape[0],
        channels=x.shape[1],
        filters=y.shape[1],
        area_in=area_in,
        area_out=area_out,
        kernel=weight.shape[2:],
        groups=max(1, x.shape[1] // max(1, weight.shape[1])),
        itemsize=x.itemsize,
        channels_last=is_last(x) or is_last(weight),
        strided=area_in >= 2 * area_out,
    )


def is_last(t: Tensor) -> bool:
    return len(t.shape) >= 4 and not t.is_contiguous and t.strides[1] == 1
