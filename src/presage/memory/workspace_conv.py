"""The scratch memory of convolutions on a GPU with tensor cores, as cuDNN 9's heuristics choose their algorithms.

Tensor-core kernels (half precision, or float32 where TF32 is allowed) read channels-last tensors; plain float32
kernels read channels-first ones. Tensors in the other layout are copied into the workspace: that is most of it. The
rest are the algorithms' own buffers: partial sums of a weight gradient split over the GPU, Winograd and FFT transforms.
Which algorithm is taken only cuDNN knows, so this part is a bounded model; the sizes, given the algorithm, are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod

from presage.graph.graph import Graph, Op, Tensor
from presage.hardware import Gpu
from presage.memory.workspace_reduce import buffers as reduction_buffers

WHOLE_LIMIT = 3_400_000_000  # no transform of whole images was seen to take more; larger than 32, no more than 2.6 GB
WHOLE_LIMIT_LARGE = 2_600_000_000
WINOGRAD = 36  # values of a transformed 6 x 6 tile, which makes 4 x 4 outputs
SPLIT_LIMIT = 16 * 1024 * 1024


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
    tensor_cores: bool
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
        return self.batch * self._padded * self.area_in * self.itemsize

    @property
    def output_bytes(self) -> int:
        return self.batch * self.filters * self.area_out * self.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.filters * self._padded // self.groups * prod(self.kernel) * self.itemsize

    @property
    def _padded(self) -> int:
        """Channels as the kernel reads them, with padding.

        Half-precision tensor cores take eight channels at a time. Their grouped kernels lay several groups side by
        side in one tile, and for that have as many channels go into a group as come out of it.
        """
        if self.itemsize == 2 and self.groups > 1:
            return max(self.channels, self.filters)
        step = 8 if self.itemsize == 2 and self.channels < 8 else 1
        return -(-self.channels // step) * step

    @property
    def padded(self) -> bool:
        return self._padded != self.channels

    @property
    def image_layer(self) -> bool:
        """A first layer, three or four channels and small patches: its kernels read images in any layout."""
        patches = self.area_in == self.area_out * prod(self.kernel)
        return self.channels <= 4 and (max(self.kernel) <= 4 or (patches and self.itemsize == 4))

    @property
    def as_product(self) -> bool:
        """A GEMM over channels without a layout change: rows must be 16-byte aligned in float32."""
        return self.pointwise and not self.strided and (self.itemsize == 2 or self.area_in % 4 == 0)

    @property
    def copies(self) -> int:
        """The tensors in the layout the kernel reads; a pointwise weight is the same in both."""
        return self.input_bytes + self.output_bytes + (0 if self.pointwise else self.weight_bytes)


def forward(graph: Graph, op: Op) -> tuple[int, ...]:
    """Scratch of a forward convolution."""
    tensors, outputs = graph.inputs_of(op), graph.outputs_of(op)
    if len(tensors) < 2 or not outputs:
        return ()
    s = _shape(graph, tensors[0], tensors[1], outputs[0])
    if s.depthwise:
        return ()
    if s.tensor_cores:
        return _nonzero(_tensor_core_forward(s))
    if s.dims == 3 and s.groups > 1:  # a group at a time, each with its own copy of its part of input and output
        return _nonzero(s.input_bytes + s.output_bytes)
    return _nonzero((s.copies if s.channels_last and s.channels >= 32 else 0) + _forward_fourier(s))


def backward(graph: Graph, op: Op, chip: Gpu) -> tuple[int, ...]:
    """The larger of the two gradients' scratch, for they are computed one after the other."""
    tensors = graph.inputs_of(op)
    if len(tensors) < 3:
        return ()
    dy, x, weight = tensors[:3]
    s = _shape(graph, x, weight, dy)
    relaid = 0 if _is_last(dy) == s.channels_last and _dense(dy) else dy.nbytes
    wants_input, _, wants_bias = _wanted(op)
    scratch = max(_data(s) if wants_input else 0, _weight(s, chip))
    bias = sum(reduction_buffers(dy.shape, dy.strides, (0, *range(2, len(dy.shape))), chip=chip)) if wants_bias else 0
    return _nonzero(relaid) + _nonzero(scratch) if relaid + scratch >= bias else (bias,)


def _tensor_core_forward(s: ConvShape) -> int:
    if s.image_layer or (s.as_product and not s.channels_last):
        return 0
    if s.channels_last:
        return s.input_bytes + s.weight_bytes if s.padded else 0
    return s.copies


def _data(s: ConvShape) -> int:
    """Scratch of the input's gradient."""
    if s.depthwise:
        return 0
    if s.tensor_cores:
        return _tensor_core_forward(s)
    return (s.copies if s.channels_last else 0) + _fourier(s)


def _weight(s: ConvShape, chip: Gpu) -> int:
    """Scratch of the weight's gradient."""
    if s.depthwise:
        return 0
    if s.tensor_cores:
        return _tensor_core_weight(s, chip)
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


def _tensor_core_weight(s: ConvShape, chip: Gpu) -> int:
    if s.channels_last:
        return (s.input_bytes if s.padded and not s.image_layer else 0) + _split(s, chip)
    if s.image_layer and s.itemsize == 4:
        return 0
    per_image = 4 * s.batch * s.filters * s.channels  # one product per image, summed afterwards
    aligned = s.itemsize == 2 or (s.channels % 4 == 0 and s.filters % 4 == 0)
    if s.as_product and aligned and per_image <= 1.6 * s.copies:
        return per_image
    return s.copies + _split(s, chip)


def _split(s: ConvShape, chip: Gpu) -> int:
    """Split-K partial weight gradients in float32: as many as fill the GPU."""
    rows = s.channels // s.groups * prod(s.kernel)
    tiles = -(-s.filters // 128) * -(-rows // 64)
    return min(4 * s.filters * rows * (chip.sms // tiles if tiles <= chip.sms // 2 else 0), SPLIT_LIMIT)


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


def _shape(graph: Graph, x: Tensor, weight: Tensor, y: Tensor) -> ConvShape:
    transposed = weight.shape[0] != y.shape[1]
    if transposed:  # a transposed convolution is another one's input gradient
        x, y = y, x
    area_in, area_out = prod(x.shape[2:]), prod(y.shape[2:])
    half = x.itemsize == 2
    return ConvShape(
        batch=x.shape[0],
        channels=x.shape[1],
        filters=y.shape[1],
        area_in=area_in,
        area_out=area_out,
        kernel=weight.shape[2:],
        groups=max(1, x.shape[1] // max(1, weight.shape[1])),
        itemsize=x.itemsize,
        tensor_cores=half or (x.itemsize == 4 and bool(graph.flags.get("cudnn.allow_tf32", True))),
        channels_last=_is_last(x) or _is_last(weight),
        strided=area_in >= 2 * area_out,
    )


def _is_last(t: Tensor) -> bool:
    return len(t.shape) >= 4 and not t.is_contiguous and t.strides[1] == 1


def _dense(t: Tensor) -> bool:
    return 0 not in (s for s, n in zip(t.strides, t.shape, strict=True) if n > 1)


def _wanted(op: Op) -> tuple[bool, bool, bool]:
    mask = op.inputs[-1] if op.inputs else None
    if isinstance(mask, list) and len(mask) == 3:
        return bool(mask[0]), bool(mask[1]), bool(mask[2])
    return True, True, False


def _nonzero(n: int) -> tuple[int, ...]:
    return (n,) if n else ()
