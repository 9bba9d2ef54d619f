"""The stand-in for CUDA: a backend with no device behind it, on which autograd and autocast run as they do for a GPU.

PyTorch lets one outside backend register, once per process. It stays registered after a capture; nothing that runs on
other devices goes through it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from presage.errors import PresageError

__all__ = ["CUDA", "NAME", "register", "stand_in"]

NAME = "presage"
CUDA = torch.device("cuda", 0)


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
    from presage.capture import pretend, torch_shells

    torch_shells.install(pretend.unpatched)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    from presage.capture import autocast, composite

    autocast.register()
    composite.register()
