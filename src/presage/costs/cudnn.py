"""Which of its engines cuDNN takes for a convolution: cuDNN itself is asked, without a GPU.

Its engines differ by a factor of up to twenty, and which one it takes jumps from size to size. cuDNN plans for a GPU
that is only described to it, so where its libraries are installed (a CUDA build of PyTorch brings them; else `pip
install 'presage[cudnn]'`; PRESAGE_CUDNN=FOLDER names another, PRESAGE_CUDNN=off asks none) its choice need not be
guessed: 0.5 ms a convolution, in a process of its own (`cudnn_child`). cuDNN 9.13, 9.19 and 9.20 chose the same
engines with the same settings in all of 3,832 convolutions drawn from the sweeps.

Only for Hopper GPUs, where kernels of all these engines were timed. Else, and without the libraries, the corrections
guess it from the sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from presage.costs.call import Call
from presage.costs.families.conv import ENGINE, OPS, OWN, WORKSPACE, Conv, conv
from presage.hardware import Gpu

PLACE = "PRESAGE_CUDNN"
SHARED_MEMORY = {"9.0": 232448}  # bytes a block may have, by compute capability
FORBIDDEN = {"tf32": [1], "float32": [1, 0]}  # numerical notes of engines that PyTorch leaves out
TYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "tf32": "float32", "float64": "float64"}
WORTH_SAYING = 0.1  # of the GPU time
CHUNK, PATIENCE = 4000, 300.0  # convolutions a process is asked for at once, and seconds until it is given up


@dataclass(frozen=True, slots=True)
class CudnnEngine:
    """What cuDNN takes for a convolution."""

    number: int
    knobs: tuple[tuple[int, int], ...]  # settings, by their number in cuDNN
    workspace: int  # bytes; fewer than with a GPU where parts of a sum are chosen by what fits on it at once

    def facts(self) -> dict[str, float]:
        """As facts of a call."""
        knobs = {f"knob{k}": float(v) for k, v in self.knobs}
        return {ENGINE: float(self.number), WORKSPACE: float(self.workspace)} | knobs


@cache
def libraries() -> tuple[Path, Path] | None:
    """cuDNN and cuBLASLt, which it needs, where both are installed."""
    place = os.environ.get(PLACE, "")
    if place == "off":
        return None
    nvidia = find_spec("nvidia")
    packages = [Path(p) for p in nvidia.submodule_search_locations or ()] if nvidia else []
    folders = [Path(place)] if place else [*(f for p in packages for f in p.glob("*/lib")), Path(sys.prefix, "lib")]
    found = [next((f for d in folders for f in sorted(d.glob(name))), None)
             for name in ("libcudnn.so.9", "libcublasLt.so.1[23]")]  # fmt: skip
    return (found[0], found[1]) if found[0] and found[1] else None


def can_ask(gpu: Gpu) -> bool:
    """Whether cuDNN is there and knows this GPU's kind."""
    return gpu.compute_capability in SHARED_MEMORY and libraries() is not None


def note(share: float, gpu: Gpu) -> str:
    """How the kernels of convolutions were found that take this share of the GPU's time; nothing where that is little
    or the GPU is of another kind."""
    if share < WORTH_SAYING or gpu.compute_capability not in SHARED_MEMORY:
        return ""
    if can_ask(gpu) and any(e is not None for e in _KNOWN.values()):
        return f"convolutions ({share:.0%} of GPU time): cuDNN was asked which engines it takes"
    why, remedy = "cuDNN is not installed", "pip install 'presage[cudnn]' lets presage ask it, without a GPU"
    if can_ask(gpu):
        why = "cuDNN is installed but plans nothing here"
    elif place := os.environ.get(PLACE):
        why = f"cuDNN is {'not asked' if place == 'off' else 'not there'} ({PLACE}={place})"
        remedy = "unset it, or name the folder with libcudnn.so.9 and libcublasLt.so"
    return (
        f"convolutions ({share:.0%} of GPU time): {why}, so its engines are guessed from the sizes, and one call in "
        f"ten is more than 40% off; {remedy}"
    )


_KNOWN: dict[tuple[str, Conv], CudnnEngine | None] = {}


def engines(convolutions: Sequence[Conv], gpu: Gpu) -> list[CudnnEngine | None]:
    """What cuDNN takes for each; None where it was not asked or has none. Many at once are quicker."""
    if not can_ask(gpu):
        return [None] * len(convolutions)
    new = [c for c in dict.fromkeys(convolutions) if (gpu.key, c) not in _KNOWN and not c.native and c.kind in TYPES]
    parts = [new[i : i + CHUNK] for i in range(0, len(new), CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part, found in zip(parts, pool.map(lambda p: _query(p, gpu), parts), strict=True):
            _KNOWN.update(zip(((gpu.key, c) for c in part), found, strict=True))
    return [_KNOWN.get((gpu.key, c)) for c in convolutions]


def with_engines(calls: Sequence[Call], gpu: Gpu) -> list[Call]:
    """Calls, those of convolutions with the engine that cuDNN takes where it was asked."""
    if not can_ask(gpu):
        return list(calls)
    known = {i: conv(c) for i, c in enumerate(calls) if c.name in OPS and len(c.tensors) > 1}
    facts = {i: {ENGINE: OWN} for i, c in known.items() if c.native}
    facts |= {i: e.facts() for i, e in zip(known, engines([*known.values()], gpu), strict=True) if e}
    return [replace(c, facts={**c.facts, **facts[i]}) if i in facts else c for i, c in enumerate(calls)]


def _query(convolutions: Sequence[Conv], gpu: Gpu) -> list[CudnnEngine | None]:
    files = libraries() or ()
    command = [sys.executable, "-I", str(Path(__file__).with_name("cudnn_child.py")), *map(str, files)]
    folders = os.pathsep.join(dict.fromkeys(str(f.parent) for f in files))
    environment = {**os.environ, "LD_LIBRARY_PATH": folders + os.pathsep + os.environ.get("LD_LIBRARY_PATH", "")}
    question = json.dumps({"device": device(gpu), "questions": [_question(c) for c in convolutions]})
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, env=environment, check=True, timeout=PATIENCE
        )
    except subprocess.SubprocessError:
        return [None] * len(convolutions)
    found = json.loads(done.stdout)
    return [a and CudnnEngine(a[0], tuple(map(tuple, a[1])), a[2]) for a in found]


def _question(c: Conv) -> dict[str, Any]:
    first = 0 if max(c.large[0], c.small[0], c.kernel[0]) > 1 else 1  # 1-D ones are 2-D to cuDNN
    return {
        "role": c.role,
        "dtype": TYPES[c.kind],
        "channels_last": c.channels_last,
        "large": [c.n, c.c, *c.large[first:]],
        "weights": [c.k, c.c // c.groups, *c.kernel[first:]],
        "small": [c.n, c.k, *c.small[first:]],
        "padding": c.padding[first:],
        "stride": c.stride[first:],
        "dilation": c.dilation[first:],
        "forbidden": FORBIDDEN.get(c.kind, []),
    }


def device(gpu: Gpu) -> dict[str, Any]:
    """A GPU as cuDNN wants it described. Its choice does not follow clocks, caches or the driver."""
    return {
        "deviceName": gpu.name,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "deviceVer": round(100 * float(gpu.compute_capability)),
        "driverVer": 13000,
        "multiProcessorCount": gpu.sms,
        "totalGlobalMem": gpu.memory,
        "l2CacheSize": gpu.l2,
        "smClockRateKHz": round(gpu.boost_clock / 1e3),
        "memClockRateKHz": 3201000,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": SHARED_MEMORY[gpu.compute_capability],
        "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": gpu.threads_per_sm,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
    }
