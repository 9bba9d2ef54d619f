"""A stand-in for a collective on one GPU: as many blocks, threads, registers and shared memory as NCCL's kernels take.

NCCL's in public traces: a block for each channel, 512 to 640 threads, 96 registers a thread, 42 to 104 KB of shared
memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

__all__ = ["CHUNK", "CLOCK_GHZ", "SHARED", "THREADS", "Beside", "Ring"]

THREADS, SHARED, MOST = 640, 100 * 1024, 32
VECTORS = 10  # of 16 bytes that a thread has in flight, of each input
CHUNK = THREADS * VECTORS * 16  # bytes of a block's step
SLICE = 48 << 20  # bytes that each block walks through, of each of three buffers: more than the cache holds
CLOCK_GHZ = 1.98

SOURCE = """
extern "C" __global__ void __launch_bounds__(640, 1) ring(
    const float4* a, const float4* b, float4* d, int slice, int chunks, int gap, int moves, int most_mega,
    volatile int* stop, volatile int* progress, unsigned long long* times)
{
    extern __shared__ int reserved[];
    __shared__ int over;
    const long long first = (long long)blockIdx.x * slice;
    const int step = blockDim.x * 10;
    const long long begun = clock64();
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) times[2 * blockIdx.x] = now;
    int at = 0;
    for (int done = 1; done <= chunks; ++done) {
        const long long since = clock64();
        if (moves) {
            float4 x[10], y[10];
            #pragma unroll
            for (int k = 0; k < 10; ++k) {
                x[k] = a[first + at + threadIdx.x + k * blockDim.x];
                y[k] = b[first + at + threadIdx.x + k * blockDim.x];
            }
            #pragma unroll
            for (int k = 0; k < 10; ++k)
                d[first + at + threadIdx.x + k * blockDim.x] = make_float4(
                    x[k].x + y[k].x, x[k].y + y[k].y, x[k].z + y[k].z, x[k].w + y[k].w);
            at += step;
            if (at + step > slice) at = 0;
        }
        while (clock64() - since < gap) {}
        __syncthreads();
        if (threadIdx.x == 0) {
            progress[8 * blockIdx.x] = done;
            over = *stop || (clock64() - begun) >> 20 > most_mega;
        }
        __syncthreads();
        if (over) break;
    }
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) { times[2 * blockIdx.x + 1] = now; reserved[0] = 0; }
}
"""


@dataclass(frozen=True)
class Beside:
    """What runs beside: so many channels, at so many bytes received a second in all (0: as fast as it can)."""

    channels: int
    moves: bool
    bus: float = 0.0

    @property
    def gap(self) -> int:
        """Cycles that a step takes at least."""
        if not self.moves:
            return 4000
        return int(CHUNK * self.channels / self.bus * CLOCK_GHZ * 1e9) if self.bus else 0


class Ring:
    """The stand-in, ready to run on a stream of its own."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.kernel = torch.cuda._compile_kernel(SOURCE, "ring")
        self.kernel.set_shared_memory_config(SHARED)
        self.buffers = [torch.randn(MOST * SLICE // 4, device="cuda") for _ in range(3)]
        self.stop = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.progress = torch.zeros(8 * MOST, device="cuda", dtype=torch.int32)
        self.times = torch.zeros(2 * MOST, device="cuda", dtype=torch.int64)
        self.low, self.high = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def registers(self) -> int:
        """Of a thread, as compiled."""
        value = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(ctypes.byref(value), 4, self.kernel.func)
        return value.value

    def start(self, what: Beside, stream: Any, chunks: int = 2**31 - 2, most: float = 0.5) -> None:
        """Runs until `stop` is set, its chunks are done, or `most` seconds are over."""
        mega = max(1, int(most * CLOCK_GHZ * 1e9 / 2**20))
        args = [*self.buffers, SLICE // 16, chunks, what.gap, int(what.moves), mega]
        self.kernel(
            grid=(what.channels, 1, 1),
            block=(THREADS, 1, 1),
            args=[*args, self.stop, self.progress, self.times],
            shared_mem=SHARED,
            stream=stream,
        )

    def reset(self, stream: Any) -> None:
        self.stop.zero_()
        self.progress.zero_()
        stream.wait_stream(self.torch.cuda.current_stream())
