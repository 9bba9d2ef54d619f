"""ModelStep: the training step of a model and an example batch that exist already, for `capture`.

    capture(ModelStep(model, batch))

The step is forward, loss, backward, optimizer. It runs on a copy of the model whose weights have shapes and no memory:
the model itself is neither changed nor allocated again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from presage.errors import PresageError

Loss = Callable[[Any, Any], torch.Tensor]  # of the model's output and the batch
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class ModelStep:
    """Builds the step of `model` on `batch`: model(tensor), model(*tuple) or model(**dict).

    `optimizer`: a class or function of the parameters, or an optimizer whose class and settings are taken (default:
    AdamW). `loss`: a function of (output, batch) (default: the output's own loss, else the mean of the output).
    """

    model: nn.Module
    batch: Any
    optimizer: MakeOptimizer | Optimizer | None = None
    loss: Loss | None = None
    notes: list[str] = field(default_factory=list)  # what was assumed

    @property
    def __name__(self) -> str:
        return type(self.model).__name__

    @property
    def shapes(self) -> dict[str, str]:
        """Shapes of the batch by name: {'input_ids': '8x1024'}."""
        named = self.batch if isinstance(self.batch, Mapping) else {"batch": self.batch}
        shapes = {k: ["x".join(map(str, t.shape)) for t in tree_leaves(v) if _is_tensor(t)] for k, v in named.items()}
        return {str(name): ", ".join(found) for name, found in shapes.items() if found}

    def __call__(self, device: str) -> Callable[[], None]:
        self.notes.clear()
        model = shape_copy(self.model, device).train()
        if not self.model.training:
            self._note("the model is predicted in training mode (it is in eval mode now)")
        batch = tree_map(lambda v: v.to(device) if _is_tensor(v) else v, self.batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise PresageError(f"{self.__name__} has no parameters that require gradients: there is no training step")
        optimizer = self._optimizer(trained)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = self._loss(_called(model, batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def _optimizer(self, trained: list[nn.Parameter]) -> Optimizer:
        given = self.optimizer
        if given is None:
            self._note("optimizer assumed: torch.optim.AdamW with its defaults (give optimizer=)")
            return torch.optim.AdamW(trained)
        if not isinstance(given, Optimizer):
            return given(trained)
        known = inspect.signature(type(given)).parameters
        if len(given.param_groups) > 1:
            self._note(f"the {len(given.param_groups)} parameter groups of the optimizer are predicted as one")
        return type(given)(trained, **{k: v for k, v in given.defaults.items() if k in known})

    def _loss(self, output: Any, batch: Any) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(output, batch)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            self._note("loss: the model's own (output.loss)")
            return own
        found = [t for t in tree_leaves(dict(output) if isinstance(output, Mapping) else output) if _is_trained(t)]
        if not found:
            raise PresageError(
                f"{self.__name__} returns no tensor with gradients: give loss=, a function of its output"
            )
        if found[0].dim() == 0:
            self._note("loss: the model's output, which is a single number")
            return found[0]  # type: ignore[no-any-return]
        self._note("loss assumed: the mean of the model's output (give loss=, a function of output and batch)")
        return found[0].float().mean()  # type: ignore[no-any-return]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def shape_copy(model: nn.Module, device: str) -> nn.Module:
    """A deep copy on `device` whose tensors have the model's shapes, types and sharing, and none of its values."""
    copies: dict[int, Any] = {}
    for tensor in _tensors(model):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
    return deepcopy(model, copies)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors that modules hold."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if _is_tensor(value))


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_trained(value: Any) -> bool:
    return _is_tensor(value) and bool(value.requires_grad)
