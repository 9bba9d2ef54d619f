"""Clock, power and energy of the GPU, straight from the driver's management library (no package needed)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

SM, MEMORY = 1, 2


@dataclass(frozen=True)
class Reading:
    """What the driver says now. Energy counts from when the driver was loaded."""

    sm_mhz: int
    memory_mhz: int
    watts: float
    joules: float
    celsius: int


class Gauge:
    """Reads one GPU; where the library is missing it reads zeros, and says so with `works`."""

    def __init__(self, index: int = 0) -> None:
        self.handle = ctypes.c_void_p()
        try:
            self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            self.works = self.library.nvmlInit_v2() == 0
            self.works &= self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)) == 0
        except OSError:
            self.works = False

    def _ask(self, name: str, kind: Any, *which: int) -> int:
        value = kind()
        if self.works:
            getattr(self.library, name)(self.handle, *which, ctypes.byref(value))
        return int(value.value)

    def mhz(self) -> int:
        return self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, SM)

    def joules(self) -> float:
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def read(self) -> Reading:
        return Reading(
            self.mhz(),
            self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, MEMORY),
            self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint) / 1e3,
            self.joules(),
            self._ask("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
        )

    def limit_watts(self) -> float:
        return self._ask("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        if self.works:
            self.library.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode()
