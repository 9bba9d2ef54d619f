"""One kind of GPU: data-sheet figures and measured ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from presage.errors import InputError
from presage.hardware.facts import Figure, SourcedFigures, find_file, read_figures, shipped_files, unknown_name

KIND = "gpus"
TEXTS = {"name": str, "driver_names": list, "architecture": str, "compute_capability": str}
MHZ, GB, TERA, MIB, GIB = 1e6, 1e9, 1e12, 1024.0**2, 1024.0**3
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")

FIGURES = {
    "sms": Figure(1, 1, 1000, whole=True),
    "threads_per_sm": Figure(1, 512, 4096, whole=True),
    "base_clock_MHz": Figure(MHZ, 100, 5000, required=False),
    "boost_clock_MHz": Figure(MHZ, 100, 5000),
    "memory_GiB": Figure(GIB, 1, 4096),
    "usable_memory_bytes": Figure(1, 1e9, 4e12, required=False, whole=True),
    "memory_bandwidth_GBps": Figure(GB, 50, 100_000),
    "l2_MiB": Figure(MIB, 0.25, 4096),
    "l3_MiB": Figure(MIB, 1, 65_536, required=False),
    "power_limit_W": Figure(1, 10, 5000),
    "peak_fp32_TFLOPS": Figure(TERA, 1, 10_000),  # vector units
    "peak_tf32_TFLOPS": Figure(TERA, 5, 100_000, required=False),  # from here on tensor cores, without sparsity
    "peak_fp16_TFLOPS": Figure(TERA, 5, 100_000),
    "peak_bf16_TFLOPS": Figure(TERA, 5, 100_000, required=False),
    "peak_fp8_TFLOPS": Figure(TERA, 10, 100_000, required=False),
    "peak_fp4_TFLOPS": Figure(TERA, 10, 100_000, required=False),
    "link_both_ways_GBps": Figure(GB / 2, 10, 20_000, required=False),  # vendors add up both directions
    "pcie_both_ways_GBps": Figure(GB / 2, 8, 1024),
    "sustained_copy_GBps": Figure(GB, 25, 100_000, required=False),
    "sustained_bf16_TFLOPS": Figure(TERA, 5, 100_000, required=False),
    "cublas_workspace_MiB": Figure(MIB, 1, 1024),
    "cublaslt_workspace_MiB": Figure(MIB, 1, 1024),
}

VENDOR = re.compile(r"nvidia|geforce|quadro|tesla|rtx|amd|instinct|[^a-z0-9]")  # what may be left out of a name
# What people call a GPU of which there are several, and the one that most have.
COMMON = {
    "h100": "h100_sxm", "h10080gb": "h100_sxm", "h100pcie80gb": "h100_pcie", "a100": "a100_80gb",
    "a100sxm": "a100_80gb", "a10080": "a100_80gb", "a10040": "a100_40gb", "a100pcie": "a100_pcie_80gb",
    "v100": "v100_32gb", "v100sxm": "v100_32gb", "v100pcie": "v100_pcie_32gb", "p100": "p100_pcie", "mi300": "mi300x",
    "mi325": "mi325x", "mi355": "mi355x",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of a GPU in SI units: bytes, bytes/s one way, FLOP/s, Hz, W. None where unknown or absent."""

    key: str
    name: str
    driver_names: tuple[str, ...]
    architecture: str
    compute_capability: str
    sms: int
    threads_per_sm: int
    base_clock: float | None
    boost_clock: float
    memory: int  # what programs can have, where that was seen; else what the vendor says
    memory_bandwidth: float
    l2: int
    l3: int | None
    power_limit: float
    peak: dict[str, float] = field(hash=False)  # by dtype, dense: fp32 on vector units, the others on tensor cores
    link: float | None  # NVLink or Infinity Fabric
    pcie: float
    sustained_copy: float | None  # bytes read and written
    sustained_bf16: float | None  # under the power limit
    cublas_workspace: int  # that PyTorch gives each handle
    cublaslt_workspace: int
    facts: SourcedFigures = field(compare=False, repr=False)  # the figures by their keys in the file, and their sources


def gpu(name: str) -> Gpu:
    """A GPU by its short name (h200), what people or its driver call it (h100, RTX 4090), or from a .toml file."""
    path = find_file(KIND, name)
    if path is not None:
        return read_gpu(path)
    for known in gpus():
        if name.lower() in (n.lower() for n in known.driver_names) or _folded(name) == _folded(known.key):
            return known
    if _folded(name) in COMMON:
        return gpu(COMMON[_folded(name)])
    raise unknown_name("gpu", name, "or give the path of a .toml file (docs/my_gpu.md)")


def gpu_choice(name: str) -> str:
    """Which GPU a name was taken for, in words, where it could be several; else nothing."""
    key = COMMON.get(_folded(name))
    if key is None or find_file(KIND, name) is not None:
        return ""
    others = [g.key for g in gpus() if g.key.startswith(_folded(name)) and g.key != key]
    more = f"; others are {', '.join(others)}" if others else ""
    return f"{name} was taken to be {key}, the {gpu(key).name}{more}"


def _folded(name: str) -> str:
    return VENDOR.sub("", name.lower())


@cache
def gpus() -> tuple[Gpu, ...]:
    """All GPUs that ship with presage."""
    return tuple(read_gpu(path) for path in shipped_files(KIND))


def read_gpu(path: str | Path) -> Gpu:
    """A GPU from its data file."""
    facts = read_figures(Path(path), TEXTS, FIGURES)
    f = facts.figures
    _check(Path(path), facts)
    return Gpu(
        key=facts.key,
        name=facts.texts["name"],
        driver_names=tuple(facts.texts["driver_names"]),
        architecture=facts.texts["architecture"],
        compute_capability=facts.texts["compute_capability"],
        sms=int(f["sms"]),
        threads_per_sm=int(f["threads_per_sm"]),
        base_clock=f.get("base_clock_MHz"),
        boost_clock=f["boost_clock_MHz"],
        memory=int(f.get("usable_memory_bytes", f["memory_GiB"])),
        memory_bandwidth=f["memory_bandwidth_GBps"],
        l2=int(f["l2_MiB"]),
        l3=int(f["l3_MiB"]) if "l3_MiB" in f else None,
        power_limit=f["power_limit_W"],
        peak={d: f[f"peak_{d}_TFLOPS"] for d in DTYPES if f"peak_{d}_TFLOPS" in f},
        link=f.get("link_both_ways_GBps"),
        pcie=f["pcie_both_ways_GBps"],
        sustained_copy=f.get("sustained_copy_GBps"),
        sustained_bf16=f.get("sustained_bf16_TFLOPS"),
        cublas_workspace=int(f["cublas_workspace_MiB"]),
        cublaslt_workspace=int(f["cublaslt_workspace_MiB"]),
        facts=facts,
    )


def _check(path: Path, facts: SourcedFigures) -> None:
    """Raise for figures that contradict each other."""
    for less, more in (
        ("base_clock_MHz", "boost_clock_MHz"),
        ("usable_memory_bytes", "memory_GiB"),
        ("sustained_copy_GBps", "memory_bandwidth_GBps"),
        ("sustained_bf16_TFLOPS", "peak_bf16_TFLOPS"),
        ("peak_fp32_TFLOPS", "peak_tf32_TFLOPS"),
        ("peak_tf32_TFLOPS", "peak_fp16_TFLOPS"),
        ("peak_fp16_TFLOPS", "peak_fp8_TFLOPS"),
        ("peak_fp8_TFLOPS", "peak_fp4_TFLOPS"),
    ):
        if facts.figures.get(less, 0) > facts.figures.get(more, float("inf")):
            raise InputError(path, f"should not be more than {more}", less)
    if not all(isinstance(n, str) and n for n in facts.texts["driver_names"]):
        raise InputError(path, "should be a list of texts", "driver_names")
