"""The stand-in for CUDA: a backend with no device behind it, on which autograd and autocast run as they do for a GPU.

PyTorch lets one outside backend register, once per process. It stays registered after a capture; nothing that runs on
other devices goes through it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from presage.errors import PresageError
from presage.hardware import gpu

NAME = "presage"
CUDA = torch.device("cuda", 0)
GPU = gpu("h200")  # the device that a captured step sees
SUPPORTED = (2, 10), (2, 16)  # torch from, and below; pyproject.toml has the same


def check_torch(version: str = torch.__version__) -> None:
    """Raise an error where this version of torch is not one that capture is tested with."""
    oldest, above = SUPPORTED
    if not oldest <= tuple(int(n) for n in version.split(".")[:2]) < above:
        needed = f"torch>={oldest[0]}.{oldest[1]},<{above[0]}.{above[1]}"
        raise PresageError(f"torch {version} is not supported: capture needs {needed} (pip install '{needed}')")


check_torch()
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: E402


class _Module:
    """What PyTorch asks a backend's module (`torch.presage`)."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """There are no random numbers to seed."""

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:  # noqa: ARG002
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        """Likewise."""


@cache
def stand_in() -> torch.device:
    """The device that plays CUDA's part, registered on first use."""
    register()
    return torch.device(NAME, 0)


@cache
def register() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise PresageError(
            f"capture needs PyTorch's place for an outside backend, but {taken!r} has taken it: "
            "capture in a process that does not load that backend"
        )
    from presage.capture import fake_device, torch_shells

    torch_shells.install(fake_device.unpatched)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    from presage.capture import autocast, composite

    autocast.register()
    composite.register_composites()


# ---- answers of `torch.cuda` during a capture: one idle H200

MEMORY = 150_754_820_096  # bytes of an H200 as the driver reports them


class Generator(torch.Generator):
    """A generator that says it is on the device it was asked for."""

    _on: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls)
        self._on = torch.device(device)
        return self

    def __init__(self, device: Any = "cpu") -> None:
        del device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self._on.type == "cuda" else self._on


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value  # noqa: ARG005


@contextmanager
def _device(device: Any) -> Any:
    del device
    yield


def cuda_patches() -> list[tuple[Any, str, Any]]:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, multi_processor_count=GPU.sms, is_integrated=False,
        warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=62914560, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, shared_memory_per_block=49152,
        gcnArchName="", is_multi_gpu_board=False, uuid="",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "init": None,
        "get_device_capability": (9, 0), "get_device_name": "NVIDIA H200", "get_device_properties": properties,
        "is_bf16_supported": True, "is_tf32_supported": True, "get_arch_list": ["sm_90"], "set_device": None,
        "empty_cache": None, "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0,
        "max_memory_reserved": 0, "reset_peak_memory_stats": None, "reset_max_memory_allocated": None,
        "mem_get_info": (MEMORY, MEMORY), "memory_stats": {}, "manual_seed": None, "manual_seed_all": None,
        "seed": None, "seed_all": None, "get_rng_state_all": [], "set_rng_state_all": None, "set_rng_state": None,
        "is_current_stream_capturing": False, "ipc_collect": None, "_lazy_init": None,
        "memory_summary": "",
        "can_device_access_peer": False, "set_per_process_memory_fraction": None, "get_allocator_backend": "native",
    }  # fmt: skip
    out: list[tuple[Any, str, Any]] = [(torch.cuda, name, _always(value)) for name, value in answers.items()]
    out += [
        (torch.cuda, "synchronize", _synchronize),
        (torch.cuda, "get_rng_state", lambda device=0: torch.zeros(16, dtype=torch.uint8)),  # noqa: ARG005
        (torch.cuda, "device", _device),
        (torch.cuda, "device_of", _always(nullcontext())),
        (torch.cuda.amp.common, "amp_definitely_not_available", _always(False)),
        (torch, "Generator", Generator),
        (torch._C, "_cuda_getCurrentRawStream", _always(0)),
        (torch.backends.cuda, "is_built", _always(True)),
        (torch.backends.cudnn, "is_available", _always(True)),
        # asked only before an RNN's weights are laid into one buffer, which needs real memory
        (torch.backends.cudnn, "is_acceptable", _always(False)),
    ]
    asked = {"is_available": True, "device_count": 1, "current_device_index": 0, "set_device_index": None}
    out += [(torch.accelerator, name, _always(value)) for name, value in asked.items()]
    out += [
        (torch.accelerator, "current_accelerator", _always(torch.device("cuda"))),
        (torch.accelerator, "synchronize", _synchronize),
        # DataParallel on one GPU: the batch is moved there as it is
        (torch.nn.parallel.comm, "scatter", lambda tensor, *_, **__: (tensor.to(CUDA, non_blocking=True),)),
    ]
    out += [
        (torch.cuda.nvtx, name, _always(0)) for name in ("range_push", "range_pop", "mark", "range_start", "range_end")
    ]
    return out


def _synchronize(device: Any = None) -> None:
    """Waiting for the GPU is part of the step: the recorder, where one listens, notes it."""
    del device
    for listener in listeners:
        listener("cuda::synchronize")


listeners: list[Any] = []
