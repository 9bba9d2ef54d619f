"""Scratch of recurrent layers, against layers measured on an H200 and not used for the fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_memory import one_op, tensor

from presage.graph.graph import Tensor
from presage.memory.workspace import transient
from presage.memory.workspace_rnn import Recurrent

MEASURED = Path(__file__).parents[2] / "data" / "h200_memory" / "recurrent.jsonl.gz"
MODES = {"RNN": 1, "LSTM": 2, "GRU": 3}


def errors() -> list[float]:
    rows = [json.loads(line) for line in gzip.decompress(MEASURED.read_bytes()).splitlines()]
    held = np.random.default_rng(0).random(len(rows)) >= 0.75
    return [_error(r["p"], r["ws"][0][1]) for r, h in zip(rows, held, strict=True) if h]


def _error(p: dict[str, Any], nbytes: int) -> float:
    """How far the scratch is off; PyTorch's copy of a batch-first input is not cuDNN's."""
    width = 4 if p["dtype"] == "float32" else 2
    copied = width * p["b"] * p["s"] * p["i"] if p["batch_first"] and p["b"] > 1 else 0
    shape = (p["s"], p["b"], p["i"], p["d"], p["layers"], 1 + p["both"], width)
    return abs(Recurrent(MODES[p["op"]], *shape, brain=p["dtype"] == "bfloat16").scratch / (nbytes - copied) - 1)


def test_scratch_of_layers_that_were_held_out() -> None:
    found = np.array(errors())
    assert len(found) == 124
    assert np.median(found) < 0.001
    assert found.mean() < 0.01


SIZE = {"hidden": 64, "steps": 100, "batch": 32, "features": 48}


def scratch(x: Tensor, *, batch_first: bool = False, alive: list[int] | None = None) -> tuple[int, ...]:
    """`alive`: packed sequences at each step."""
    rest: list[Any] = [
        [],
        4,
        None,
        None,
        None,
        3,
        SIZE["hidden"],
        0,
        1,
        batch_first,
        0.0,
        True,
        False,
        alive or [],
        None,
    ]
    return transient(*one_op("aten::_cudnn_rnn", [x, *rest]))


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_not_in_the_order_of_time_are_copied(batch_first: bool) -> None:
    steps, batch, features = SIZE["steps"], SIZE["batch"], SIZE["features"]
    x = tensor(0, (batch, steps, features) if batch_first else (steps, batch, features))
    own = Recurrent(3, steps, batch, features, SIZE["hidden"], 1, 1, 4).scratch
    assert scratch(x, batch_first=batch_first) == ((x.nbytes, own) if batch_first else (own,))


def test_packed_sequences_take_as_much_as_the_longest() -> None:
    alive = [32] * 60 + [20] * 40
    own = Recurrent(3, 100, 32, SIZE["features"], SIZE["hidden"], 1, 1, 4).scratch
    assert scratch(tensor(0, (sum(alive), SIZE["features"])), alive=alive) == (own,)
