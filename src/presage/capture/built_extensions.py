"""Extensions that code builds as it loads them (torch.utils.cpp_extension), such as DeepSpeed's optimizers.

Kernels that do what one of PyTorch's own does are captured as that one; other CUDA code is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from presage.capture.backend import users_line
from presage.capture.compiled import is_capturing
from presage.capture.contents import current_recorder
from presage.errors import PresageError

CUDA_SOURCES = (".cu", ".cuh")


def _adam(_: int, __: Any, lists: Sequence[list[torch.Tensor]], lr: float, beta1: float, beta2: float, eps: float,
          step: int, decoupled: int, *more: Any) -> None:  # fmt: skip
    """DeepSpeed's (and Apex') Adam over lists of gradients, parameters and both moments."""
    del step
    gradients, parameters, first, second = lists
    run: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": float(more[1]), "eps": eps}
    run(parameters, gradients, first, second, [], [], **rates, amsgrad=False, maximize=False)


STAND_INS = {"fused_adam": SimpleNamespace(multi_tensor_adam=_adam)}
ON_HOST = {"cpu_adam", "cpu_adagrad", "cpu_lion"}  # DeepSpeed's optimizers of offloaded state


def replace_builders(module: Any) -> None:
    """Put captured code in the place of what torch.utils.cpp_extension builds."""
    for name in ("load", "load_inline"):
        setattr(module, name, _instead(getattr(module, name)))


def _instead(build: Callable[..., Any]) -> Callable[..., Any]:
    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            return build(name, *args, **kwargs)
        if name in STAND_INS:
            return STAND_INS[name]
        sources = kwargs.get("sources", args[0] if args else ())
        of_cuda = [s for s in ([sources] if isinstance(sources, str) else sources) if str(s).endswith(CUDA_SOURCES)]
        if name in ON_HOST:
            what = (
                "an optimizer that DeepSpeed compiles for the host, is not captured: keep the optimizer on the GPU, or"
            )
            raise _refused(f'{users_line()}: {name}, {what} give "torch_adam": true among its params')
        if of_cuda or kwargs.get("with_cuda") or kwargs.get("cuda_sources"):
            what = "CUDA code that is compiled as it is loaded, which is not captured: leave it out, or put a module in"
            raise _refused(f"{users_line()}: {name} is {what} its place whose functions presage.register_op prices")
        return build(name, *args, **kwargs)

    return load


def _refused(text: str) -> PresageError:
    """The refusal, which is told also where the code makes another error of it."""
    error, recorder = PresageError(text), current_recorder()
    if recorder is not None:
        recorder.failure = recorder.failure or error
    return error
