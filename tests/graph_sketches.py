"""Graphs built by hand, a line an op."""

from __future__ import annotations

from typing import Any

from presage.graph.graph import Event, Graph, Op, Phase, Ref, Role, Storage, Tensor, check


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class Sketch:
    """Collects tensors and ops, then gives the Graph. Results live until `free` or the end."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.events: list[Event] = []

    def tensor(self, *shape: int, dtype: str = "float32", role: Role = "activation", name: str = "") -> Ref:
        """A tensor that was there before the step."""
        nbytes = Tensor(0, 0, shape, row_major(shape), dtype).nbytes
        self.storages.append(Storage(len(self.storages), nbytes, role, name))
        return self.view(len(self.storages) - 1, shape, row_major(shape), dtype)

    def view(self, storage: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, offset: int = 0) -> Ref:
        self.tensors.append(Tensor(len(self.tensors), storage, shape, strides, dtype, offset))
        return Ref(len(self.tensors) - 1)

    def new(self, *shape: int, dtype: str = "float32", role: Role = "activation") -> Ref:
        """A tensor that the next op makes."""
        ref = self.tensor(*shape, dtype=dtype, role=role)
        self.events.append(Event(len(self.ops), self.tensors[ref.id].storage, True))
        return ref

    def free(self, ref: Ref) -> None:
        self.events.append(Event(len(self.ops), self.tensors[ref.id].storage, False))

    def op(
        self,
        name: str,
        inputs: list[Any],
        outputs: list[Ref],
        phase: Phase = "forward",
        names: str = "",
        writes: tuple[Ref, ...] = (),
        **more: Any,
    ) -> Op:
        made = Op(
            name=f"aten::{name}",
            overload=more.pop("overload", ""),
            inputs=tuple(inputs),
            outputs=tuple(r.id for r in outputs),
            phase=phase,
            thread="autograd" if phase == "backward" else "main",
            names=tuple(names.split()),
            writes=tuple(r.id for r in writes),
            **more,
        )
        self.ops.append(made)
        return made

    def graph(self) -> Graph:
        return check(
            Graph(tuple(self.ops), tuple(self.tensors), tuple(self.storages), tuple(self.events), source="sketch")
        )


def training_step(layers: int = 3, rows: int = 8, width: int = 16, act: str = "relu", dtype: str = "float32") -> Graph:
    """A stack of linear layers with an activation function, its backward and an update in place."""
    s = Sketch()
    weights = [s.tensor(width, width, dtype=dtype, role="parameter", name=f"layers.{i}.weight") for i in range(layers)]
    x = s.tensor(rows, width, dtype=dtype, role="input")
    inputs, outputs = [], []
    for i, w in enumerate(weights):
        y = s.new(rows, width, dtype=dtype)
        s.op("mm", [x, w], [y], module=f"layers.{i}")
        z = s.new(rows, width, dtype=dtype)
        s.op(act, [y], [z], module=f"layers.{i}.act")
        inputs.append(x)
        outputs.append(z)
        s.free(y)
        x = z
    grad, grads = s.tensor(rows, width, dtype=dtype), []
    for i in reversed(range(layers)):
        below = s.new(rows, width, dtype=dtype)
        s.op("threshold_backward", [grad, outputs[i], 0], [below], "backward", module=f"layers.{i}.act")
        if i < layers - 1:
            s.free(grad)
        s.free(outputs[i])
        gw = s.new(width, width, dtype=dtype, role="gradient")
        s.op("mm", [inputs[i], below], [gw], "backward", module=f"layers.{i}")
        grads.append((weights[i], gw))
        grad = s.new(rows, width, dtype=dtype)
        s.op("mm", [below, weights[i]], [grad], "backward", module=f"layers.{i}")
        s.free(below)
    s.free(grad)
    for w, g in grads:
        s.op("add_", [w, g], [w], "optimizer", writes=(w,), names="self other", overload="Tensor")
        s.free(g)
    return s.graph()
