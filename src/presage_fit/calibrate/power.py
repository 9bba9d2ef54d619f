"""Clock and power under sustained load: at its power limit a GPU lowers its clock, and compute-bound work slows.

Each load runs for a second or two, alone, mixed with others, or with pauses. Kept: time per call at first and later,
the clock, the watts (energy over time), and the FLOPs and bytes of a call.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REST, SETTLE, CHUNK = 0.35, 0.45, 0.02
SM_CLOCK = 1  # of NVML


@dataclass(frozen=True)
class Load:
    call: Callable[[], Any]
    flops: float = 0.0
    bytes: float = 0.0
    kind: str = ""


def _products(torch: Any, r: Callable[..., Any]) -> dict[str, Load]:
    def product(m: int, n: int, k: int, dtype: str, tf32: bool = False, zeros: bool = False) -> Load:
        a, b = r(m, k, d=dtype), r(n, k, d=dtype)
        if zeros:
            a, b = torch.zeros_like(a), torch.zeros_like(b)

        def call() -> Any:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            return a @ b.t()

        width = 4 if dtype == "float32" else 2
        return Load(call, 2.0 * m * n * k, width * (m * k + n * k + m * n), "tf32" if tf32 else dtype)

    return {
        "gemm_bf16": product(8192, 8192, 8192, "bfloat16"),
        "gemm_bf16_zeros": product(8192, 8192, 8192, "bfloat16", zeros=True),
        "gemm_bf16_layer": product(8192, 4096, 1024, "bfloat16"),
        "gemm_bf16_layer2": product(16384, 768, 3072, "bfloat16"),
        "gemm_bf16_small": product(1024, 1024, 1024, "bfloat16"),
        "gemm_fp16": product(8192, 8192, 8192, "float16"),
        "gemm_tf32": product(4096, 4096, 4096, "float32", tf32=True),
        "gemm_tf32_layer": product(8192, 4096, 1024, "float32", tf32=True),
        "gemm_fp32": product(4096, 4096, 4096, "float32"),
        "gemm_fp32_layer": product(4096, 3072, 768, "float32"),
    }


def _others(torch: Any, r: Callable[..., Any]) -> dict[str, Load]:
    f = torch.nn.functional
    x, y = r(2**28), r(2**28)
    s, t = r(2**22), r(2**22)
    w, im = r(512, 512, 3, 3), r(64, 512, 56, 56).to(memory_format=torch.channels_last)
    wf, imf = r(256, 256, 3, 3, d="float32"), r(32, 256, 56, 56, d="float32")
    q = r(8, 16, 4096, 128).requires_grad_(True)
    h = r(65536, 2048)
    g = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    flops = 4.0 * 8 * 16 * 4096 * 4096 * 128
    attended = f.scaled_dot_product_attention(q, q, q)
    grad = torch.randn_like(attended)
    table = r(2_000_000, 128, d="float32")
    i = torch.randint(0, 2_000_000, (1 << 20,), device="cuda")

    def conv(tf32: bool) -> Callable[[], Any]:
        def call() -> Any:
            torch.backends.cudnn.allow_tf32 = tf32
            return f.conv2d(imf, wf, padding=1)

        return call

    back = 2.5 * flops
    return {
        "copy": Load(lambda: y.copy_(x), 0, 2.0**30, "memory"),
        "copy_cached": Load(lambda: t.copy_(s), 0, 2.0**24, "cache"),
        "gelu": Load(lambda: f.gelu(x), 0, 2.0**30, "memory"),
        "add": Load(lambda: x.add_(y), 0, 1.5 * 2.0**30, "memory"),
        "layer_norm": Load(lambda: f.layer_norm(h, (2048,), g, g), 0, 2.0**29, "memory"),
        "lookup": Load(lambda: f.embedding(i, table), 0, 2.0**30, "memory"),
        "conv_bf16": Load(lambda: f.conv2d(im, w, padding=1), 2.0 * 64 * 56**2 * 512**2 * 9, 4e8, "bfloat16"),
        "conv_tf32": Load(conv(True), 2.0 * 32 * 56**2 * 256**2 * 9, 2e8, "tf32"),
        "conv_fp32": Load(conv(False), 2.0 * 32 * 56**2 * 256**2 * 9, 2e8, "float32"),
        "attention_bf16": Load(lambda: f.scaled_dot_product_attention(q, q, q), flops, 5e8, "bfloat16"),
        "attention_bf16_back": Load(lambda: attended.backward(grad, retain_graph=True), back, 1e9, "bfloat16"),
    }


def sustained(torch: Any, seconds: float = 1.1) -> dict[str, Any]:
    """Every load alone; the large product with pauses and with copies in between; the GPU at rest."""

    def r(*shape: int, d: str = "bfloat16") -> Any:
        return torch.randn(*shape, device="cuda", dtype=getattr(torch, d))

    sensor = GpuSensor()
    loads = _products(torch, r) | _others(torch, r)
    idle = _watts(sensor, lambda: time.sleep(1.0))
    rows = [_one(torch, sensor, name, load, [], 0.0, seconds) for name, load in loads.items()]
    for name in ("gemm_bf16", "gemm_tf32", "attention_bf16"):
        for copies in (1, 2, 4, 8):
            rows.append(_one(torch, sensor, name, loads[name], [loads["copy"]] * copies, 0.0, seconds))
        for pause in (0.1, 0.25, 0.5):
            rows.append(_one(torch, sensor, name, loads[name], [], pause, seconds))
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"limit_watts": sensor.limit_watts(), "idle_watts": round(idle, 1), "works": sensor.works, "loads": rows}


def _watts(sensor: GpuSensor, run: Callable[[], Any]) -> float:
    start, before = time.perf_counter(), sensor.joules()
    run()
    return (sensor.joules() - before) / (time.perf_counter() - start)


def _one(
    torch: Any, sensor: GpuSensor, name: str, load: Load, others: list[Load], pause: float, seconds: float
) -> dict[str, Any]:
    """One load for some seconds: the first chunk is timed at the full clock, later ones as the clock settles."""
    for part in (load, *others):
        part.call()
    torch.cuda.synchronize()
    each = _timed(torch, load, others, 2)
    calls = max(1, int(CHUNK / (sum(each) / 1e3)))
    time.sleep(REST)
    first = _timed(torch, load, others, min(3, calls))
    times: list[tuple[float, float]] = []
    clocks: list[int] = []
    begin, joules, since = time.perf_counter(), 0.0, 0.0
    while time.perf_counter() - begin < seconds:
        chunk = time.perf_counter()
        times.append(_timed(torch, load, others, calls))
        if not since and time.perf_counter() - begin > SETTLE:
            joules, since, times, clocks = sensor.joules(), time.perf_counter(), [], []
        if pause:
            time.sleep((time.perf_counter() - chunk) * pause / (1 - pause))
        clocks.append(sensor.mhz())
    watts = (sensor.joules() - joules) / (time.perf_counter() - since)
    return {
        "load": name,
        "kind": load.kind,
        "flops": load.flops,
        "bytes": load.bytes,
        "copies": len(others),
        "copied_bytes": sum(o.bytes for o in others),
        "pause": pause,
        "first_ms": round(first[0], 5),
        "ms": round(statistics.median(t[0] for t in times), 5),
        "others_ms": round(statistics.median(t[1] for t in times), 5),
        "mhz": round(statistics.mean(clocks), 1),
        "watts": round(watts, 1),
    }


def _timed(torch: Any, load: Load, others: list[Load], calls: int) -> tuple[float, float]:
    """Milliseconds of the load and of what comes between, per call."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls + 1)]
    marks[0].record()
    for k in range(calls):
        load.call()
        marks[2 * k + 1].record()
        for other in others:
            other.call()
        marks[2 * k + 2].record()
    marks[-1].synchronize()
    own = sum(marks[2 * k].elapsed_time(marks[2 * k + 1]) for k in range(calls))
    rest = sum(marks[2 * k + 1].elapsed_time(marks[2 * k + 2]) for k in range(calls)) if others else 0.0
    return own / calls, rest / calls


class GpuSensor:
    """Clock, power and energy of one GPU, from the driver's management library (NVML); zeros where that is missing."""

    def __init__(self, index: int = 0) -> None:
        self.handle = ctypes.c_void_p()
        try:
            self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            self.works = self.library.nvmlInit_v2() == 0
            self.works &= self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)) == 0
        except OSError:
            self.works = False

    def _query(self, name: str, kind: Any, *which: int) -> int:
        value = kind()
        if self.works:
            getattr(self.library, name)(self.handle, *which, ctypes.byref(value))
        return int(value.value)

    def mhz(self) -> int:
        return self._query("nvmlDeviceGetClockInfo", ctypes.c_uint, SM_CLOCK)

    def joules(self) -> float:
        return self._query("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def limit_watts(self) -> float:
        return self._query("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        if self.works:
            self.library.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode()
