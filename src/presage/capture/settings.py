"""PyTorch's switches: read for the graph, and put back as they were."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["flags", "kept"]

_SWITCHES: list[tuple[Any, str]] = [
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
]
_SDP = ("flash", "mem_efficient", "math", "cudnn")


def flags() -> dict[str, bool | str]:
    """What the step's kernels depend on."""
    out: dict[str, bool | str] = {
        "allow_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "deterministic_algorithms": bool(torch.are_deterministic_algorithms_enabled()),
        "float32_matmul_precision": str(torch.get_float32_matmul_precision()),
    }
    for name in ("allow_tf32", "benchmark", "deterministic", "enabled"):
        out[f"cudnn.{name}"] = bool(getattr(torch.backends.cudnn, name))
    return out


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is switched inside is switched back at the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _SWITCHES]
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    sdp = {n: getattr(torch._C, f"_get_{n}_sdp_enabled")() for n in _SDP}
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    # what fails on fake tensors is told once, as the user's error, and not also logged with a traceback of torch's
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        log.setLevel(level)
        torch.set_float32_matmul_precision(precision)
        for owner, name, value in before:
            setattr(owner, name, value)
        torch.set_default_dtype(dtype)
        if (deterministic, warn_only) != (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ):  # which loads the compiler's settings
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for n, on in sdp.items():
            getattr(torch._C, f"_set_sdp_use_{n}")(on)
        torch.set_rng_state(state)
        torch.set_grad_enabled(grad)
