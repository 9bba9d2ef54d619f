"""The stand-in for CUDA: a backend with no device behind it, on which autograd and autocast run as they do for a GPU.

PyTorch lets one outside backend register, once per process. It stays registered after a capture; nothing that runs on
other devices goes through it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from presage.errors import PresageError
from presage.hardware import gpu

NAME = "presage"
CUDA = torch.device("cuda", 0)
GPU = gpu("h200")  # whose kernels PyTorch's choices are taken from
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
    from presage.capture import autocast, composite, custom_ops

    autocast.register()
    custom_ops.install()
    composite.register_composites()


# ---- answers of `torch.cuda` during a capture


class GpuAnswers:
    """What `torch.cuda` says of the GPU that is predicted; of its memory, what the capture has taken so far."""

    memory: Any = None  # the capture's MemoryTracker, while there is one

    def __init__(self, name: str = "h200") -> None:
        chip = gpu(name)
        self.name = chip.driver_names[0] if chip.driver_names else chip.name
        major, _, minor = chip.compute_capability.partition(".")
        self.capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (9, 0)
        self.bf16 = self.capability >= (8, 0)
        self.total = chip.memory
        self.properties = SimpleNamespace(
            name=self.name, major=self.capability[0], minor=self.capability[1], total_memory=chip.memory,
            multi_processor_count=chip.sms, L2_cache_size=chip.l2, max_threads_per_multi_processor=chip.threads_per_sm,
            is_integrated=False, warp_size=32, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
            shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
            is_multi_gpu_board=False, uuid="",
        )  # fmt: skip

    def live(self, device: Any = None) -> int:
        del device
        return int(self.memory.live) if self.memory else 0

    def peak(self, device: Any = None) -> int:
        del device
        return int(self.memory.peak) if self.memory else 0

    def free(self, device: Any = None) -> tuple[int, int]:
        return max(0, self.total - self.live(device)), self.total

    def reset(self, device: Any = None) -> None:
        if self.memory:
            self.memory.peak = self.live(device)

    def stats(self, device: Any = None) -> Counter[str]:
        """All figures but these are 0."""
        live, peak = self.live(device), self.peak(device)
        now = {"current": live, "peak": peak, "allocated": peak}
        kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
        return Counter({f"{kind}.all.{when}": value for kind in kinds for when, value in now.items()})

    def summary(self, device: Any = None, abbreviated: bool = False) -> str:
        del abbreviated
        return f"{self.name}: {self.live(device):,} bytes allocated, at most {self.peak(device):,}"

    @property
    def _started(self) -> Callable[..., None]:
        """As `subprocess.Popen` begins; `nvidia-smi`, which many log and few have where no GPU is, says the GPU."""
        begin, say = subprocess.Popen.__init__, [sys.executable, "-c", f"print({self.name!r})"]

        def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
            first = args[0] if isinstance(args, list | tuple) and args else args
            if first == "nvidia-smi" and shutil.which("nvidia-smi") is None:
                args = say
            begin(process, args, *more, **options)

        return start

    def patches(self) -> list[tuple[Any, str, Any]]:
        answers = {
            "get_device_capability": _always(self.capability), "get_device_name": _always(self.name),
            "get_device_properties": _always(self.properties), "is_bf16_supported": _always(self.bf16),
            "is_tf32_supported": _always(self.bf16),
            "get_arch_list": _always([f"sm_{self.capability[0]}{self.capability[1]}"]),
            "memory_allocated": self.live, "max_memory_allocated": self.peak, "memory_reserved": self.live,
            "max_memory_reserved": self.peak, "memory_cached": self.live, "max_memory_cached": self.peak,
            "mem_get_info": self.free, "memory_stats": self.stats, "memory_summary": self.summary,
            "reset_peak_memory_stats": self.reset, "reset_max_memory_allocated": self.reset,
            "reset_accumulated_memory_stats": self.reset,
        }  # fmt: skip
        out: list[tuple[Any, str, Any]] = [
            (owner, name, answer)
            for owner in (torch.cuda, torch.cuda.memory)
            for name, answer in answers.items()
            if hasattr(owner, name)
        ]
        out.append((subprocess.Popen, "__init__", self._started))
        return out + [
            (torch.accelerator, name, answers[name])
            for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                         "memory_stats", "reset_peak_memory_stats")
            if hasattr(torch.accelerator, name)
        ]  # fmt: skip


_TYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip


def legacy_dtype(kind: Any) -> torch.dtype | None:
    """The dtype of torch.cuda.FloatTensor and its like, or of their names."""
    if isinstance(kind, _LegacyType):
        return kind.of
    name = kind.removeprefix("torch.cuda.") if isinstance(kind, str) and kind.startswith("torch.cuda.") else ""
    return _TYPES.get(name.removesuffix("Tensor"))


def legacy_name(dtype: torch.dtype) -> str:
    return next((f"torch.cuda.{name}Tensor" for name, of in _TYPES.items() if of == dtype), str(dtype))


class _LegacyType(type):
    """The class of torch.cuda.FloatTensor and its like: tensors of a dtype on the GPU."""

    of: torch.dtype

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.is_cuda and x.dtype == cls.of

    def __call__(cls, *args: Any, **_: Any) -> Any:
        if args and all(type(n) is int for n in args):
            return torch.empty(*args, dtype=cls.of, device=CUDA)
        given = args[0] if args else ()
        if isinstance(given, torch.Size):
            return torch.empty(given, dtype=cls.of, device=CUDA)
        return torch.as_tensor(given, dtype=cls.of, device=CUDA)


def _set_default_type(kind: Any) -> None:
    """torch.set_default_tensor_type of a CUDA type: its device and dtype."""
    dtype = legacy_dtype(kind)
    torch.set_default_device("cpu" if dtype is None else CUDA)
    if dtype is None:
        torch._C._set_default_tensor_type(kind)
    else:
        torch.set_default_dtype(dtype)


class Generator(torch.Generator):
    """A generator that says it is on the device it was asked for."""

    _on: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls)
        self._on = torch.device(device)
        return self

    def __init__(self, device: Any = "cpu") -> None:
        del device

    def get_state(self) -> torch.Tensor:
        return super().get_state() if self._on.type == "cpu" else torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        return super().set_state(state) if self._on.type == "cpu" else self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self._on.type == "cuda" else self._on


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value  # noqa: ARG005


class _Device:
    """`with torch.cuda.device(0):`; a class, as others ask whether something is one."""

    def __init__(self, device: Any = None) -> None:
        check_index(device)
        self.idx, self.prev_idx = 0, -1

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _DeviceOf(_Device):
    def __init__(self, tensor: Any = None) -> None:
        del tensor
        super().__init__()


own_numbers: set[int] = set()  # by which code may call its one GPU, beside 0: its rank, and that in its node


def check_index(device: Any) -> None:
    """Refuse another GPU than this process's own."""
    if isinstance(device, str):
        device = torch.device(device)
    number = device.index if isinstance(device, torch.device) else device
    if type(number) is int and number > 0 and number not in own_numbers:
        raise PresageError(
            f"{users_line()}: cuda:{number} is a second GPU in one process, which a capture does not have: "
            "write one rank's step on one GPU, and let --ranks and --strategy spread it over many"
        )


def users_line() -> str:
    """FILE:LINE of the user's code that runs now."""
    from presage.capture.call_sites import CallSites

    return CallSites().line() or "the step"


def _set_device(device: Any = None) -> None:
    check_index(device)


def cuda_patches(count: int) -> list[tuple[Any, str, Any]]:
    """What `torch.cuda` says on a node of `count` GPUs."""
    answers: dict[str, Any] = {
        "is_available": True, "device_count": count, "current_device": 0, "is_initialized": True, "init": None,
        "empty_cache": None, "manual_seed": None, "manual_seed_all": None,
        "seed": None, "seed_all": None, "get_rng_state_all": [], "set_rng_state_all": None, "set_rng_state": None,
        "is_current_stream_capturing": False, "ipc_collect": None, "_lazy_init": None,
        "can_device_access_peer": False, "set_per_process_memory_fraction": None, "get_allocator_backend": "native",
    }  # fmt: skip
    out: list[tuple[Any, str, Any]] = [(torch.cuda, name, _always(value)) for name, value in answers.items()]
    out += [
        (torch.cuda, "synchronize", _synchronize),
        (torch.cuda, "get_rng_state", lambda device=0: torch.zeros(16, dtype=torch.uint8)),  # noqa: ARG005
        (torch.cuda, "device", _Device),
        (torch.cuda, "device_of", _DeviceOf),
        (torch.cuda, "set_device", _set_device),
        (torch.cuda.amp.common, "amp_definitely_not_available", _always(False)),
        (torch, "Generator", Generator),
        (torch.cuda, "default_generators", (Generator("cuda"),) * count),
        *(
            (torch._C, f"_cuda_{name}", _always(0))
            for name in ("getCurrentRawStream", "getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice")
        ),
        (torch.backends.cuda, "is_built", _always(True)),
        (torch.backends.cudnn, "is_available", _always(True)),
        # asked only before an RNN's weights are laid into one buffer, which needs real memory
        (torch.backends.cudnn, "is_acceptable", _always(False)),
    ]
    for name, of in _TYPES.items():
        out.append((torch.cuda, f"{name}Tensor", _LegacyType(f"{name}Tensor", (), {"of": of})))
    out.append((torch, "set_default_tensor_type", _set_default_type))
    asked = {"is_available": True, "device_count": count, "current_device_index": 0, "set_device_index": None}
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
