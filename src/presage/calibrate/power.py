"""Clock and power under sustained load: at its power limit a GPU lowers its clock, and compute-bound work slows."""

from __future__ import annotations

import subprocess
import time
from typing import Any

__all__ = ["sustained"]

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


def _loads(torch: Any) -> dict[str, Any]:
    def r(*shape: int, d: str = "bfloat16") -> Any:
        return torch.randn(*shape, device="cuda", dtype=getattr(torch, d))

    a, b = r(8192, 8192), r(8192, 8192)
    c, d = r(4096, 4096, d="float32"), r(4096, 4096, d="float32")
    x, y = r(2**28), r(2**28)
    w, im = r(512, 512, 3, 3), r(64, 512, 56, 56).to(memory_format=torch.channels_last)
    q = r(8, 16, 4096, 128)
    f = torch.nn.functional

    def tf32() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = True
        out = c @ d
        torch.backends.cuda.matmul.allow_tf32 = False
        return out

    return {
        "gemm_bf16": lambda: a @ b,
        "gemm_fp32": lambda: c @ d,
        "gemm_tf32": tf32,
        "copy": lambda: y.copy_(x),
        "gelu": lambda: f.gelu(x),
        "conv_bf16": lambda: f.conv2d(im, w, padding=1),
        "attention_bf16": lambda: f.scaled_dot_product_attention(q, q, q),
    }


def sustained(torch: Any, seconds: float = 4.0) -> list[dict[str, Any]]:
    """For each load: time per call in the first tenths of a second and at the end, with clock and power."""
    return [_one(torch, name, call, seconds) for name, call in _loads(torch).items()]


def _one(torch: Any, name: str, call: Any, seconds: float) -> dict[str, Any]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    time.sleep(0.5)
    times: list[float] = []
    samples: list[list[float]] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 20)
        if len(samples) < 1 + (time.perf_counter() - begin) / 0.5:
            said = subprocess.run(QUERY, capture_output=True, text=True, check=False).stdout.strip().split(",")
            samples.append([round(time.perf_counter() - begin, 2), *(float(x) for x in said)])
    some = [round(t, 5) for t in times[:: max(1, len(times) // 40)]]
    return {"load": name, "first_ms": round(times[0], 5), "last_ms": round(times[-1], 5), "ms": some, "smi": samples}
