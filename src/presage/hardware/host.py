"""One kind of host: the machine around a GPU, and what single calls cost its processor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from presage.errors import InputError
from presage.hardware.facts import (
    Figure,
    SourcedFigures,
    check_figures,
    find_file,
    load_toml,
    shipped_files,
    unknown_name,
)

KIND = "hosts"
VERSION = 3  # with small steps; since 2 calls that launch kernels in rounds, before in long loops one after the other
READ = (1, 2, VERSION)
TEXTS = {"name": str, "processor": str}
US = 1e-6
# Calls that launch nothing; a slice of a tensor on the GPU takes three times as long (3.7 us against 1.3 us).
FREE = ("view", "transpose", "slice")
SAME_BESIDE_GPU = ("view", "transpose")
# Calls on tensors of one element in host memory, and of Python itself.
CPU = (
    "python_call", "module_call", "cpu_add", "cpu_mul", "cpu_add_inplace", "cpu_relu", "cpu_gelu", "cpu_to", "cpu_mm",
    "cpu_linear", "cpu_bmm", "cpu_layer_norm", "cpu_softmax", "cpu_sum", "cpu_mean", "cpu_embedding", "cpu_index",
    "cpu_cat", "cpu_stack", "cpu_clone", "cpu_zeros", "cpu_empty", "cpu_dropout", "cpu_foreach_add",
    "cpu_backward_add", "cpu_backward_view", "cpu_backward_mul", "cpu_backward_mm", "cpu_adam", "cpu_step",
)  # fmt: skip
# Calls that launch kernels, of tensors so small that only the host counts.
GPU = (
    "gpu_add", "gpu_mul", "gpu_add_inplace", "gpu_relu", "gpu_gelu", "gpu_to", "gpu_mm", "gpu_linear", "gpu_bmm",
    "gpu_layer_norm", "gpu_softmax", "gpu_sum", "gpu_mean", "gpu_embedding", "gpu_index", "gpu_cat", "gpu_stack",
    "gpu_clone", "gpu_contiguous", "gpu_zeros", "gpu_empty", "gpu_slice", "gpu_dropout", "gpu_conv2d", "gpu_batch_norm",
    "gpu_max_pool2d", "gpu_scaled_dot_product_attention", "gpu_foreach_add", "gpu_cross_entropy_loss",
    "gpu_backward_add", "gpu_backward_view", "gpu_backward_mul", "gpu_backward_relu", "gpu_backward_gelu",
    "gpu_backward_mm", "gpu_backward_layer_norm", "gpu_backward_softmax",
)  # fmt: skip
STEPS = ("gpu_step_dense", "gpu_step_conv")  # training steps of small nets on a GPU: the mean over many processors
RENAMED = {"add_": "add_inplace", "_foreach_add_": "foreach_add", "native_layer_norm": "layer_norm"}
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
COSTS = tuple(f"{name}_us" for name in (*FREE, *CPU, *GPU, *STEPS))
FIGURES = {
    "cpus": Figure(1, 1, 4096, whole=True),
    "memory_GiB": Figure(1024.0**3, 1, 65_536, required=False),
} | {name: Figure(US, 0.005, 100_000, required=False) for name in COSTS}
# Keys that other files have, and what the file then is.
OTHERS = {
    "architecture": "the file of a GPU, which --gpu takes",
    "links": "the file of a platform, which --platform takes",
    "parallel": "a job file, which presage job takes",
}


@dataclass(frozen=True, slots=True)
class Host:
    """Figures of a host in SI units, and seconds of single calls."""

    key: str
    name: str
    processor: str
    cpus: int  # as the operating system counts them
    memory: int | None
    costs: Mapping[str, float] = field(hash=False)  # by the names of COSTS
    in_rounds: bool  # calls that launch kernels took turns, and the fastest tenth counts; else one after the other
    facts: SourcedFigures = field(compare=False, repr=False)


def host(name: str) -> Host:
    """A host by its short name, or from a .toml file."""
    path = find_file(KIND, name)
    if path is None:
        raise unknown_name("host", name, "or give the path of a .toml file (presage calibrate --host FILE.toml)")
    return read_host(path)


@cache
def hosts() -> tuple[Host, ...]:
    """All hosts that ship with presage."""
    return tuple(read_host(path) for path in shipped_files(KIND))


def read_host(path: str | Path) -> Host:
    """A host from its data file."""
    return host_of(Path(path), load_toml(Path(path)))


def host_of(path: Path, table: dict[str, Any]) -> Host:
    """A host from the contents of its file."""
    _check_kind(path, table)
    version = table.pop("version", VERSION)
    if version not in READ:
        raise InputError(
            path, f"is {version!r}, and this presage reads {READ[0]} to {VERSION}: measure the host again", "version"
        )
    facts = check_figures(path, table, TEXTS, FIGURES)
    f = facts.figures
    memory = int(f["memory_GiB"]) if "memory_GiB" in f else None
    costs = {name: f[name] for name in COSTS if name in f}
    name, processor = facts.texts["name"], facts.texts["processor"]
    return Host(facts.key, name, processor, int(f["cpus"]), memory, costs, version > READ[0], facts)


def cost_name(op: str) -> str:
    """The cost of an op as a calibration pack names it: gpu_mm_us of aten::mm, gpu_backward_mm_us of MmBackward0."""
    name = op.removeprefix("aten::")
    if name.endswith("Backward0"):
        name = CAMEL.sub("_", name.removesuffix("Backward0")).lower()
        name = f"backward_{RENAMED.get(name, name)}"
    name = RENAMED.get(name, name)
    return f"{name}_us" if name in SAME_BESIDE_GPU else f"gpu_{name}_us"


def _check_kind(path: Path, table: Mapping[str, Any]) -> None:
    """Raise for a file of something else."""
    other = next((what for key, what in OTHERS.items() if key in table), None)
    if other is None and not {"processor", "figures"} & set(table):
        other = "no file of a host: presage calibrate --host FILE.toml writes one, presage hosts lists those known"
    if other is not None:
        raise InputError(path, f"is {other}")
