"""The scratch memory of PyTorch's CUDA reductions: how a reduction is spread over the GPU, and what that costs.

A reduction with few outputs and many inputs is cut into several thread blocks per output. The blocks leave their
partial results in a buffer, and a counter per column of blocks tells which of them is the last. The shape of the launch
follows from the shape of the iteration, so the buffer's size is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.hardware import Gpu, gpu

H200 = gpu("h200")  # on which the rules were checked
THREADS = 512  # threads a block
WARP = 32
FEW, MANY = 16, 256  # values a thread should at least, and need at most, work on


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch configuration of one reduction."""

    outputs: int
    blocks: int  # columns of blocks
    blocks_per_output: int
    width: int  # results a block leaves for one output; more than one where its lanes work on different outputs

    def buffers(self, accumulate: int) -> tuple[int, ...]:
        """Partial results and counters, in bytes; `accumulate` is the size of one partial result."""
        if self.blocks_per_output == 1:
            return ()
        return accumulate * self.outputs * self.blocks_per_output * self.width, 4 * self.blocks


def buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int],
    accumulate: int = 4,
    chip: Gpu = H200,
) -> tuple[int, ...]:
    """Buffers that a reduction over `dims` (all if empty) allocates besides its output."""
    axes = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    reduced = [(strides[i], n) for i, n in enumerate(shape) if i in axes and n > 1]
    kept = [(strides[i], n) for i, n in enumerate(shape) if i not in axes and n > 1]
    if not reduced or 0 in shape:
        return ()
    return spread(_joined(sorted(reduced)), _joined(sorted(kept)), chip).buffers(accumulate)


def spread(reduced: list[tuple[int, int]], kept: list[tuple[int, int]], chip: Gpu) -> Launch:
    """The launch for a reduction over axes given as (stride, size), fastest first."""
    inputs, outputs = _size(reduced), _size(kept)
    along_rows = not kept or reduced[0][0] < kept[0][0]
    vector = _output_vector(reduced, kept) if not along_rows and kept[0][0] == 1 else 1
    fast, slow = (inputs, outputs) if along_rows else (outputs // vector, inputs)
    if along_rows and not kept and reduced[0][0] == 1 and fast > 128 and len(reduced) == 1:
        fast //= 4  # a thread reads four neighbours at once
    width, height = _block(fast, slow, THREADS // vector)
    step_in, step_out = (width, 1) if along_rows else (1, width)
    across_warps = _up(inputs, step_in) >= min(height * 16, MANY)
    if across_warps:
        step_in *= height
    else:
        step_out *= height
    blocks = _up(outputs // vector, step_out)
    target = chip.sms * (chip.threads_per_sm // (width * height))
    values = _up(inputs, step_in)
    count = 1
    if across_warps and values >= MANY and blocks <= target:
        count = max(min(_up(target, blocks), _up(values, FEW)), _up(values, MANY))
    return Launch(outputs, blocks, count, 1 if along_rows else width * vector)


def _joined(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring axes that can be walked with one stride become one."""
    out: list[tuple[int, int]] = []
    for stride, size in axes:
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = out[-1][0], out[-1][1] * size
        else:
            out.append((stride, size))
    return out


def _output_vector(reduced: list[tuple[int, int]], kept: list[tuple[int, int]]) -> int:
    """Outputs a thread works on at once: what every other stride and the fastest kept size can be divided by."""
    vector = 4
    for n in [kept[0][1], *(s for s, _ in reduced), *(s for s, _ in kept[1:])]:
        while n % vector:
            vector //= 2
    return vector


def _block(fast: int, slow: int, threads: int) -> tuple[int, int]:
    fast_power, slow_power = min(_power(fast), threads), min(_power(slow), threads)
    height = min(slow_power, threads // min(fast_power, WARP))
    return min(fast_power, threads // height), height


def _power(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def _size(axes: list[tuple[int, int]]) -> int:
    out = 1
    for _, n in axes:
        out *= n
    return out
