"""Tape: a graph builder with autograd. Dense layers become the ops PyTorch runs, forward and backward, without PyTorch.

Every layer records its backward function; `backward` calls them in reverse order, as autograd does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import DTYPE_BYTES, Graph, Phase, Ref, Tensor

ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
Note = Callable[[], None]


class AutogradTape(GraphBuilder):
    """Collects ops; tensors are ids. `dtype` is that of the layers' GEMMs."""

    def __init__(self, dtype: str = "float32", *, tf32: bool = False, source: str = "") -> None:
        flags: dict[str, bool | str] = {"allow_tf32": tf32, "cudnn.allow_tf32": True}
        super().__init__(Graph((), (), (), (), source=source, flags=flags))
        self.dtype, self.phase, self.module = dtype, "forward", ""
        self.parameters: list[tuple[int, int]] = []  # tensors: parameter, gradient
        self.gradients: dict[int, int] = {}  # by tensor
        self._notes: list[tuple[str, Note]] = []

    # ---- tensors

    def activation(self, shape: Sequence[int], dtype: str = "") -> int:
        kind = dtype or self.dtype
        storage = self.add_storage(prod(shape) * DTYPE_BYTES[kind], "activation", module=self.module)
        return self.add_tensor(storage, shape, kind)

    def input(self, shape: Sequence[int], dtype: str, *, nbytes: int | None = None) -> int:
        """What is there before the step; `nbytes` where its memory is counted elsewhere."""
        size = prod(shape) * DTYPE_BYTES[dtype] if nbytes is None else nbytes
        return self.add_tensor(self.add_storage(size, "input", lifetime="always"), shape, dtype)

    def parameter(self, shape: Sequence[int], name: str) -> int:
        storage = self.add_storage(4 * prod(shape), "parameter", name, self.module, lifetime="always")
        return self.add_tensor(storage, shape, "float32")

    def of(self, tensor: int) -> Tensor:
        return self.tensors[tensor]

    def view(self, tensor: int, shape: Sequence[int], strides: Sequence[int], *within: str, offset: int = 0) -> int:
        """The same memory seen otherwise."""
        old = self.of(tensor)
        number = self.add_tensor(old.storage, shape, old.dtype, offset, strides)
        self.emit("aten::as_strided", [Ref(tensor)], [number], *within, kernels=False)
        return number

    def transposed(self, tensor: int, *within: str) -> int:
        t = self.of(tensor)
        shape, strides = (*t.shape[:-2], t.shape[-1], t.shape[-2]), (*t.strides[:-2], t.strides[-1], t.strides[-2])
        return self.view(tensor, shape, strides, *within, "aten::t", "aten::transpose")

    # ---- ops

    def emit(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Iterable[int] = (),
        *within: str,
        writes: Iterable[int] = (),
        kernels: bool = True,
        overload: str = "",
        stream: str = "",
        group: str = "",
        sync: bool = False,
    ) -> None:
        phase: Phase = self.phase  # type: ignore[assignment]
        one = new_op(
            name, inputs, outputs=outputs, writes=writes, phase=phase, overload=overload, kernels=kernels,
            thread="autograd" if phase == "backward" else "main", stream=stream, group=group,
        )  # fmt: skip
        self.append(replace(one, module=self.module, within=tuple(within), sync=sync))

    def pointwise(self, name: str, inputs: Sequence[int], *within: str, extra: Sequence[Any] = ()) -> int:
        """A new tensor like the first input."""
        out = self.activation(self.of(inputs[0]).shape, self.of(inputs[0]).dtype)
        self.emit(name, [*map(Ref, inputs), *extra], [out], *within, overload="Tensor" * (len(inputs) > 1))
        return out

    def cast(self, tensor: int, dtype: str) -> int:
        """In another dtype, by a copy; itself where it has that dtype."""
        if self.of(tensor).dtype == dtype:
            return tensor
        out = self.activation(self.of(tensor).shape, dtype)
        self.emit("aten::copy_", [Ref(out), Ref(tensor)], [out], "aten::to", "aten::_to_copy", writes=[out])
        self.note(lambda: self._cast_back(tensor, out))
        return out

    def _cast_back(self, tensor: int, out: int) -> None:
        """Gradients in the dtype of what was cast; parameters and inputs get theirs otherwise, or none."""
        if out in self.gradients:
            gradient, back = self.gradients.pop(out), self.activation(self.of(tensor).shape, self.of(tensor).dtype)
            node = ENGINE + "ToCopyBackward0", "ToCopyBackward0"
            self.emit("aten::copy_", [Ref(back), Ref(gradient)], [back], *node, writes=[back])
            self.add_gradient(tensor, back)

    # ---- gradients

    def note(self, back: Note) -> None:
        """What the backward pass does for what was just written."""
        self._notes.append((self.module, back))

    def add_gradient(self, tensor: int, gradient: int) -> None:
        """Gradients that reach a tensor by several ways are added up."""
        if tensor in self.gradients:
            gradient = self.pointwise("aten::add", [self.gradients[tensor], gradient], extra=[1])
        self.gradients[tensor] = gradient

    def keep_gradient(self, parameter: int, name: str) -> int:
        """Memory of a parameter's gradient."""
        shape = self.of(parameter).shape
        storage = self.add_storage(4 * prod(shape), "gradient", name, self.module, lifetime="kept")
        made = self.add_tensor(storage, shape, "float32")
        self.parameters.append((parameter, made))
        return made

    def accumulated(self, gradient: int) -> None:
        around = (ENGINE + ACCUMULATE, ACCUMULATE, "aten::detach", "detach", "aten::detach")
        self.emit("detach", [Ref(gradient)], [gradient], *around, kernels=False)

    def backward(self) -> None:
        self.phase = "backward"
        while self._notes:
            self.module, back = self._notes.pop()
            back()
        self.module = ""
