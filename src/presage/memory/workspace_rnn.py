"""The memory of cuDNN's recurrent layers: what the forward pass keeps for the backward one, and the scratch of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from presage.graph.graph import Graph, Op, Tensor, argument, optional_tensor

KEPT = {0: 1, 1: 1, 2: 5, 3: 6}  # by cuDNN's mode (ReLU, tanh, LSTM, GRU): values kept per hidden unit and time step
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
ALIGNMENT = 256
FIXED = 8 << 20  # bytes of scratch for each layer and direction
OUTPUT, GRADIENT = 6, 7  # places of these tensors among the arguments of the backward op


class Copies(NamedTuple):
    """How often a part of the layers lies in the scratch, for each direction."""

    hidden: float  # as wide as the hidden state, at every time step
    narrow: float  # as wide as the narrower of input and hidden state
    beyond: float  # as wide as the input is beyond the hidden state
    state: float  # one hidden state, for each layer
    small: float  # kernels that keep a small hidden state on the chip: its width, for both directions together
    stacked: float  # as wide as the hidden state, where there are several layers


COPIES = {  # by mode and directions
    (1, 1): Copies(4, 2, 3, 5, 10.5, -0.75),
    (1, 2): Copies(5, 1, 3, 7, 9, 1),
    (2, 1): Copies(5, 1, 2.75, 11, 14.5, 0),
    (2, 2): Copies(7, 0.5, 2.75, 12, 13.5, 0),
    (3, 1): Copies(4, 2, 3, 5, 15, 0),
    (3, 2): Copies(6, 0.5, 3, 6, 13, 0.5),
}
SMALL = {1: 384, 2: 192, 3: 192}  # by mode: widest hidden state that is kept on the chip; never in bfloat16


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
    brain: bool = False  # in bfloat16

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
        """The weights, a fixed part for each layer and direction, copies of inputs and states, kernels' own buffers.

        The parts were found, and their counts fitted and rounded, on 292 of 416 layers measured on an H200
        (data/h200_memory/recurrent.jsonl.gz; drawn with seed 0): of the 124 others half are within 0.1%, the mean
        error is 0.9%.
        """
        mode = max(1, self.mode)
        copies, small = COPIES[mode, self.directions], not self.brain and self.hidden <= SMALL[mode]
        widths = copies.hidden * self.hidden + copies.narrow * min(self.features, self.hidden)
        widths += copies.beyond * max(0, self.features - self.hidden) + copies.stacked * self.hidden * (self.layers > 1)
        widths += copies.small * self.hidden / self.directions * small
        rows = self.itemsize * self.batch * self.directions
        states = copies.state * self.hidden * self.layers
        return FIXED * self.layers * self.directions + self.weights + int(rows * (self.steps * widths + states))


def of(graph: Graph, op: Op) -> Recurrent | None:
    """The layers that a `_cudnn_rnn` op, or its backward, runs."""
    shift = 4 if op.name.endswith("backward") else 0  # the backward takes four more tensors first
    x = graph.inputs_of(op)[:1]
    places = (("mode", 6), ("hidden_size", 7), ("num_layers", 9))
    mode, hidden, layers = (argument(op, name, place + shift) for name, place in places)
    if not (isinstance(mode, int) and isinstance(hidden, int) and isinstance(layers, int)):
        return None
    if not x or len(x[0].shape) not in (2, 3) or mode not in KEPT:
        return None
    *lengths, features = _time_major(op, x[0]).shape
    if len(lengths) == 1:  # packed sequences, held as long as the longest: how many there are at each step
        given = argument(op, "batch_sizes", 14 + shift)
        alive = [n for n in given if isinstance(n, int)] if isinstance(given, list) else []
        if not alive:
            return None
        lengths = [len(alive), max(alive)]
    steps, batch = lengths
    both = 2 if argument(op, "bidirectional", 13 + shift) is True else 1
    return Recurrent(mode, steps, batch, features, hidden, layers, both, x[0].itemsize, x[0].dtype == "bfloat16")


def _time_major(op: Op, t: Tensor) -> Tensor:
    """A sequence as cuDNN reads it: time steps first."""
    if len(t.shape) != 3 or argument(op, "batch_first", 14 if op.name.endswith("backward") else 10) is not True:
        return t
    (a, b, *rest), (m, n, *steps) = t.shape, t.strides
    return replace(t, shape=(b, a, *rest), strides=(n, m, *steps))


def drops(op: Op) -> bool:
    """Whether a `_cudnn_rnn` op drops values out between its layers."""
    dropout = argument(op, "dropout", 11)
    return isinstance(dropout, float | int) and dropout > 0 and argument(op, "train", 12) is True


def scratch(graph: Graph, op: Op) -> tuple[int, ...]:
    """cuDNN's workspace, and copies of the sequences whose time steps do not follow each other in memory."""
    layers = of(graph, op)
    if layers is None:
        return ()
    copied = (t.nbytes for t in _sequences(graph, op) if len(t.shape) == 3 and not _time_major(op, t).is_contiguous)
    return (*copied, layers.scratch)


def _sequences(graph: Graph, op: Op) -> Iterator[Tensor]:
    """Input of a `_cudnn_rnn` op; of its backward also the output and its gradient."""
    yield graph.inputs_of(op)[0]
    for place in (OUTPUT, GRADIENT) if op.name.endswith("backward") else ():
        t = optional_tensor(graph, op, place)
        if t is not None:
            yield t


def reserves(graph: Graph) -> dict[int, int]:
    """Bytes of cuDNN's reserve spaces by storage, where the graph has no size for them."""
    out: dict[int, int] = {}
    for op in graph.ops:
        layers = of(graph, op) if op.name == "aten::_cudnn_rnn" else None
        for t in graph.outputs_of(op) if layers is not None else ():
            if layers is not None and t.dtype == "uint8" and graph.storages[t.storage].nbytes == 0:
                out[t.storage] = layers.kept
    return out
