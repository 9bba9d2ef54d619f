"""Layers of recommendation models on a Tape: linear, ReLU, interactions, loss, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import DTYPE_BYTES, Phase, Ref, Tensor, Thread


def linear(tape: AutogradTape, x: int, width: int, name: str, *, bias: bool = True, needs_input: bool = True) -> int:
    """x @ W.t() + b."""
    tape.module = name
    rows, inner = tape.of(x).shape
    weight = tape.parameter((width, inner), f"{name}.weight")
    offset = tape.parameter((width,), f"{name}.bias") if bias else None
    used, shift = tape.cast(weight, tape.dtype), None if offset is None else tape.cast(offset, tape.dtype)
    x = tape.cast(x, tape.dtype)
    across, out = tape.transposed(used, "aten::linear"), tape.activation((rows, width))
    if shift is None:
        tape.emit("aten::mm", [Ref(x), Ref(across)], [out], "aten::linear", "aten::matmul")
    else:
        tape.emit("aten::addmm", [Ref(shift), Ref(x), Ref(across), 1, 1], [out], "aten::linear")
    tape.note(lambda: _linear_back(tape, x, used, out, (weight, offset), name, needs_input))
    return out


def _linear_back(
    tape: AutogradTape, x: int, used: int, out: int, parameters: tuple[int, int | None], name: str, needs_input: bool
) -> None:
    node = ENGINE + "AddmmBackward0", "AddmmBackward0"
    gradient = tape.gradients.pop(out)
    weight, offset = parameters
    if needs_input:
        back = tape.activation(tape.of(x).shape)
        tape.emit("aten::mm", [Ref(gradient), Ref(used)], [back], *node)
    flipped = tape.transposed(gradient, *node)
    kept = tape.keep_gradient(weight, f"{name}.weight")
    weight_gradient = kept if tape.dtype == "float32" else tape.activation(tape.of(weight).shape)
    tape.emit("aten::mm", [Ref(flipped), Ref(x)], [weight_gradient], *node)
    if offset is not None:
        own = tape.keep_gradient(offset, f"{name}.bias")
        tape.emit("aten::sum", [Ref(gradient), [0], True, None], [own], node[0], overload="dim_IntList")
        tape.accumulated(own)
    if weight_gradient != kept:
        tape.emit("aten::copy_", [Ref(kept), Ref(weight_gradient)], [kept], ENGINE + "ToCopyBackward0", writes=[kept])
    tape.accumulated(kept)
    if needs_input:
        tape.add_gradient(x, back)


def relu(tape: AutogradTape, x: int, name: str) -> int:
    tape.module = name
    out = tape.activation(tape.of(x).shape)
    tape.emit("aten::clamp_min", [Ref(x), 0], [out], "aten::relu")

    def back() -> None:
        input_gradient, gradient = tape.activation(tape.of(x).shape), tape.gradients.pop(out)
        node = ENGINE + "ReluBackward0", "ReluBackward0"
        tape.emit("aten::threshold_backward", [Ref(gradient), Ref(out), 0], [input_gradient], *node)
        tape.add_gradient(x, input_gradient)

    tape.note(back)
    return out


def mlp(
    tape: AutogradTape, x: int, widths: list[int], name: str, *, last_plain: bool = False, first: bool = False
) -> int:
    """Linear layers, a ReLU after each but (`last_plain`) the last. `first`: its input needs no gradient."""
    for k, width in enumerate(widths):
        x = linear(tape, x, width, f"{name}.{2 * k}", needs_input=k > 0 or not first)
        if not (last_plain and k == len(widths) - 1):
            x = relu(tape, x, f"{name}.{2 * k + 1}")
    return x


def concatenate(tape: AutogradTape, parts: list[int], name: str) -> int:
    """Side by side along the columns."""
    tape.module = name
    rows, widths = tape.of(parts[0]).shape[0], [tape.of(p).shape[1] for p in parts]
    out = tape.activation((rows, sum(widths)), tape.of(parts[0]).dtype)
    tape.emit("aten::cat", [[Ref(p) for p in parts], 1], [out])

    def back() -> None:
        gradient, start = tape.gradients.pop(out), 0
        for part, width in zip(parts, widths, strict=True):
            node = ENGINE + "CatBackward0", "CatBackward0", "aten::narrow", "aten::slice"
            tape.add_gradient(part, tape.view(gradient, (rows, width), (sum(widths), 1), *node, offset=start))
            start += width

    tape.note(back)
    return out


def dot_interaction(tape: AutogradTape, dense: int, sparse: int, name: str = "interaction") -> int:
    """Dot products of all pairs of feature vectors, concatenated with the dense vector."""
    rows, width = tape.of(dense).shape
    vectors = 1 + tape.of(sparse).shape[1] // width
    pairs = vectors * (vectors - 1) // 2
    joined = concatenate(tape, [dense, sparse], name)
    tape.module = name
    stacked = tape.view(joined, (rows, vectors, width), (vectors * width, width, 1), "aten::view")
    flipped = tape.transposed(stacked)
    products = tape.activation((rows, vectors, vectors))
    tape.emit("aten::bmm", [Ref(stacked), Ref(flipped)], [products])
    places = [tape.input((pairs,), "int64") for _ in range(2)]
    chosen = tape.activation((rows, pairs))
    tape.emit("aten::index", [Ref(products), [None, *map(Ref, places)]], [chosen], overload="Tensor")
    tape.note(lambda: _dot_back(tape, joined, stacked, flipped, products, chosen, places))
    return concatenate(tape, [dense, chosen], name)


def _dot_back(
    tape: AutogradTape, joined: int, stacked: int, flipped: int, products: int, chosen: int, places: list[int]
) -> None:
    node, shape = (ENGINE + "IndexBackward0", "IndexBackward0"), tape.of(products).shape
    spread = tape.activation(shape)
    tape.emit("aten::fill_", [Ref(spread), 0], [spread], *node, "aten::new_zeros", "aten::zero_", writes=[spread])
    inputs = [Ref(spread), [None, *map(Ref, places)], Ref(tape.gradients.pop(chosen)), True, False]
    tape.emit("aten::_index_put_impl_", inputs, [spread], *node, writes=[spread])
    node = ENGINE + "BmmBackward0", "BmmBackward0"
    first, second = (tape.activation(tape.of(t).shape) for t in (flipped, stacked))
    tape.emit("aten::bmm", [Ref(tape.transposed(stacked, *node)), Ref(spread)], [first], *node)
    tape.emit("aten::bmm", [Ref(spread), Ref(tape.transposed(flipped, *node))], [second], *node)
    turned = tape.transposed(first, ENGINE + "TransposeBackward0", "TransposeBackward0")
    tape.emit("aten::add_", [Ref(second), Ref(turned), 1], [second], writes=[second], overload="Tensor")
    rows, wide = tape.of(joined).shape
    tape.add_gradient(joined, tape.view(second, (rows, wide), (wide, 1), "aten::view"))


def cross(tape: AutogradTape, x: int, layers: int, rank: int, name: str = "cross") -> int:
    """DCNv2's low-rank cross network: x0 * (W (V x) + b) + x, layer by layer."""
    start = x
    for k in range(layers):
        inner = linear(tape, x, rank, f"{name}.{k}.v", bias=False)
        x = _crossed(tape, start, x, linear(tape, inner, tape.of(x).shape[1], f"{name}.{k}.w"), f"{name}.{k}")
    return x


def _crossed(tape: AutogradTape, start: int, x: int, gate: int, name: str) -> int:
    tape.module = name
    scaled = tape.pointwise("aten::mul", [start, gate])
    out = tape.pointwise("aten::add", [scaled, x], extra=[1])

    def back() -> None:
        gradient = tape.gradients.pop(out)
        node = ENGINE + "MulBackward0", "MulBackward0"
        tape.add_gradient(gate, tape.pointwise("aten::mul", [gradient, start], *node))
        tape.add_gradient(start, tape.pointwise("aten::mul", [gradient, gate], *node))
        tape.add_gradient(x, gradient)

    tape.note(back)
    return out


def bce_loss(tape: AutogradTape, logits: int) -> None:
    """Binary cross entropy with logits, its mean, and where the backward pass begins."""
    logits = tape.cast(logits, "float32")
    tape.module, rows = "loss", tape.of(logits).shape[0]
    around, labels = "aten::binary_cross_entropy_with_logits", tape.input((rows, 1), "float32")
    logs = tape.pointwise("aten::log_sigmoid_forward", [logits], around, "aten::log_sigmoid")
    work = tape.activation((rows, 1), "float32")
    tape.emit("aten::fill_", [Ref(work), 1], [work], around, writes=[work], overload="Scalar")
    for name, other in (("aten::sub_", labels), ("aten::mul_", logits), ("aten::sub_", logs)):
        tape.emit(name, [Ref(work), Ref(other), 1], [work], around, writes=[work], overload="Tensor")
    mean = tape.activation((), "float32")
    tape.emit("aten::mean", [Ref(work), None, False, None], [mean], around, "aten::mean", overload="dim")
    tape.note(lambda: _loss_back(tape, logits, labels))


def _loss_back(tape: AutogradTape, logits: int, labels: int) -> None:
    node = "BinaryCrossEntropyWithLogitsBackward0"
    out = tape.pointwise("aten::sigmoid", [logits], ENGINE + node, node)
    for name, rest in (("aten::sub_", [Ref(labels), 1]), ("aten::mul_", [1.0]), ("aten::div_", [64])):
        tape.emit(name, [Ref(out), *rest], [out], ENGINE + node, node, writes=[out], overload="Tensor")
    tape.gradients[logits] = out


STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
UPDATES = {
    "sgd": ("aten::_foreach_add_",),
    "adagrad": ("aten::_foreach_addcmul_", "aten::_foreach_sqrt", "aten::_foreach_add_", "aten::_foreach_div_",
                "aten::_foreach_add_"),
    "adam": ("aten::_fused_adam_",),
}  # fmt: skip


def dense_update(tape: AutogradTape, optimizer: str) -> None:
    """One step of the dense layers' optimizer over all parameters at once."""
    tape.phase, tape.module = "optimizer", ""
    both = [[Ref(p) for p, _ in tape.parameters], [Ref(g) for _, g in tape.parameters]]
    states = []
    for _ in range(STATES[optimizer]):
        storages = [
            tape.add_storage(4 * tape.of(p).elements, "optimizer", lifetime="always") for p, _ in tape.parameters
        ]
        pairs = zip(storages, tape.parameters, strict=True)
        states.append([Ref(tape.add_tensor(s, tape.of(p).shape, "float32")) for s, (p, _) in pairs])
    for name in UPDATES[optimizer]:
        lists = [*both, *states] if name == "aten::_fused_adam_" else both
        tape.emit(name, [*lists, -0.1], [], writes=[r.id for r in both[0]], overload="List")


# ---- AutogradTape: a graph builder that records the ops PyTorch would run, forward and backward, without PyTorch

ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
Note = Callable[[], None]


class AutogradTape(GraphBuilder):
    """Collects ops; tensors are ids. `dtype` is that of the layers' GEMMs."""

    def __init__(self, dtype: str = "float32", *, tf32: bool = False) -> None:
        flags: dict[str, bool | str] = {"allow_tf32": tf32, "cudnn.allow_tf32": True}
        super().__init__(flags=flags)
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
        """A tensor that exists before the step; `nbytes` where its memory is counted elsewhere."""
        size = prod(shape) * DTYPE_BYTES[dtype] if nbytes is None else nbytes
        return self.add_tensor(self.add_storage(size, "input", lifetime="always"), shape, dtype)

    def parameter(self, shape: Sequence[int], name: str) -> int:
        storage = self.add_storage(4 * prod(shape), "parameter", name, self.module, lifetime="always")
        return self.add_tensor(storage, shape, "float32")

    def of(self, tensor: int) -> Tensor:
        return self.tensors[tensor]

    def view(self, tensor: int, shape: Sequence[int], strides: Sequence[int], *within: str, offset: int = 0) -> int:
        """A view of a tensor's storage."""
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
        **fields: Any,
    ) -> None:
        phase: Phase = self.phase  # type: ignore[assignment]
        thread: Thread = "autograd" if phase == "backward" else "main"
        self.append(
            new_op(
                name, inputs, outputs=outputs, writes=writes, phase=phase, thread=thread, within=within,
                module=self.module, **fields,
            )
        )  # fmt: skip

    def pointwise(self, name: str, inputs: Sequence[int], *within: str, extra: Sequence[Any] = ()) -> int:
        """A new tensor like the first input."""
        out = self.activation(self.of(inputs[0]).shape, self.of(inputs[0]).dtype)
        self.emit(name, [*map(Ref, inputs), *extra], [out], *within, overload="Tensor" * (len(inputs) > 1))
        return out

    def cast(self, tensor: int, dtype: str) -> int:
        """The tensor in another dtype, by a copy; itself if it has that dtype."""
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
        """Register the backward function of the op just emitted."""
        self._notes.append((self.module, back))

    def add_gradient(self, tensor: int, gradient: int) -> None:
        """Add a gradient of a tensor to those it already has."""
        if tensor in self.gradients:
            gradient = self.pointwise("aten::add", [self.gradients[tensor], gradient], extra=[1])
        self.gradients[tensor] = gradient

    def keep_gradient(self, parameter: int, name: str) -> int:
        """Allocate the gradient of a parameter."""
        shape = self.of(parameter).shape
        storage = self.add_storage(4 * prod(shape), "gradient", name, self.module, lifetime="kept")
        gradient = self.add_tensor(storage, shape, "float32")
        self.parameters.append((parameter, gradient))
        return gradient

    def accumulated(self, gradient: int) -> None:
        around = (ENGINE + ACCUMULATE, ACCUMULATE, "aten::detach", "detach", "aten::detach")
        self.emit("detach", [Ref(gradient)], [gradient], *around, kernels=False)

    def backward(self) -> None:
        self.phase = "backward"
        while self._notes:
            self.module, back = self._notes.pop()
            back()
        self.module = ""
