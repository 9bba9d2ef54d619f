"""What the size of scratch memory depends on: the few numbers of a GPU that kernels and libraries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class GpuLimits(Protocol):
    """Anything that knows these numbers, such as `presage.hardware.Gpu`."""

    @property
    def sms(self) -> int: ...
    @property
    def threads_per_sm(self) -> int: ...
    @property
    def cublas_workspace(self) -> int: ...
    @property
    def cublaslt_workspace(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Numbers:
    sms: int
    threads_per_sm: int
    cublas_workspace: int
    cublaslt_workspace: int


H200: GpuLimits = _Numbers(132, 2048, 32 << 20, 1 << 20)  # what the rules were made on
