"""The memory of cuDNN's recurrent layers: what the forward pass keeps for the backward one, and the scratch of both."""

from __future__ import annotations

from dataclasses import dataclass

from presage.graph.graph import Graph, Op, argument

KEPT = {0: 1, 1: 1, 2: 5, 3: 6}  # by cuDNN's mode (ReLU, tanh, LSTM, GRU): values kept per hidden unit and time step
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
ALIGNMENT = 256
STATES, INPUTS, FIXED = 3.6, 3.4, 15 << 20  # of the scratch: copies of the states, of the inputs, bytes


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A stack of recurrent layers over a batch of sequences."""

    mode: int
    steps: int
    batch: int
    features: int
    hidden: int
    layers: int
    directions: int
    itemsize: int

    @property
    def states(self) -> int:
        """Bytes of one layer's hidden states over all time steps."""
        return self.itemsize * self.steps * self.batch * self.hidden * self.directions

    @property
    def kept(self) -> int:
        """The reserve: gates and cells of every layer, and the output of every layer but the last; as measured."""
        return self.states * (KEPT[self.mode] * self.layers + self.layers - 1) + ALIGNMENT

    @property
    def weights(self) -> int:
        wide = self.hidden * self.directions
        inputs = self.features + (self.layers - 1) * wide + self.layers * self.hidden
        return self.itemsize * GATES[self.mode] * self.hidden * self.directions * inputs

    @property
    def scratch(self) -> int:
        """Repacked weights, copies of one layer's states and of its inputs for each direction, and a fixed part.

        Least squares over 312 of 416 layers measured on an H200 (data/h200_memory/recurrent.jsonl.gz), the factors
        rounded: of the 416 half are within 21%.
        """
        inputs = self.itemsize * self.steps * self.batch * self.features * self.directions
        repacked = self.weights if self.itemsize == 4 else 4 * self.weights // 3
        return repacked + int(STATES * self.states + INPUTS * inputs) + FIXED


def of(graph: Graph, op: Op) -> Recurrent | None:
    """The layers that a `_cudnn_rnn` op, or its backward, runs."""
    shift = 4 if op.name.endswith("backward") else 0  # the backward takes four more tensors first
    x = graph.inputs_of(op)[:1]
    places = (("mode", 6), ("hidden_size", 7), ("num_layers", 9))
    mode, hidden, layers = (argument(op, name, place + shift) for name, place in places)
    if not (isinstance(mode, int) and isinstance(hidden, int) and isinstance(layers, int)):
        return None
    if not x or len(x[0].shape) != 3 or mode not in KEPT:
        return None
    steps, batch, features = x[0].shape
    both = 2 if argument(op, "bidirectional", 13 + shift) is True else 1
    return Recurrent(mode, steps, batch, features, hidden, layers, both, x[0].itemsize)


def drops(op: Op) -> bool:
    """Whether a `_cudnn_rnn` op drops values out between its layers."""
    dropout = argument(op, "dropout", 11)
    return isinstance(dropout, float | int) and dropout > 0 and argument(op, "train", 12) is True


def scratch(graph: Graph, op: Op) -> tuple[int, ...]:
    """cuDNN's workspace, and a copy of the input where its time steps do not follow each other in memory."""
    layers = of(graph, op)
    if layers is None:
        return ()
    x = graph.inputs_of(op)[0]
    return (layers.scratch,) if x.is_contiguous else (x.nbytes, layers.scratch)


def reserves(graph: Graph) -> dict[int, int]:
    """Bytes of cuDNN's reserve spaces by storage, where the graph has no size for them."""
    out: dict[int, int] = {}
    for op in graph.ops:
        layers = of(graph, op) if op.name == "aten::_cudnn_rnn" else None
        for t in graph.outputs_of(op) if layers is not None else ():
            if layers is not None and t.dtype == "uint8" and graph.storages[t.storage].nbytes == 0:
                out[t.storage] = layers.kept
    return out
