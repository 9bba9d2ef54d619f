"""cuDNN's recurrent layers: on CUDA a whole LSTM, GRU or RNN is one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["gru", "gru_packed", "lstm", "lstm_packed", "rnn_relu", "rnn_tanh"]

aten = torch.ops.aten
DROPOUT_STATE = 132 * 2048 * 24  # bytes of random state: one per thread an H200 runs at once
RELU, TANH, LSTM, GRU = 0, 1, 2, 3  # cuDNN's modes


def _run(
    mode: int,
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
    batches: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = cell.shape[2] if cell is not None else hidden.shape[2]
    projected = hidden.shape[2] if cell is not None and cell.shape[2] != hidden.shape[2] else 0
    per_layer = (4 if biased else 2) + (1 if projected else 0)
    state = torch.empty(1, dtype=torch.uint8, device=x.device).expand(DROPOUT_STATE) if train and dropout > 0 else None
    # The weights lie in one buffer already; a stand-in of its shape must not count as memory.
    buffer = torch.empty(1, dtype=x.dtype, device=x.device).expand(sum(w.numel() for w in weights))
    out = aten._cudnn_rnn(
        x, list(weights), per_layer, buffer, hidden, cell, mode, size, projected, layers, batch_first,
        float(dropout), train, both_ways, list(batches), state,
    )  # fmt: skip
    return out[0], out[1], out[2]


def lstm(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _run(LSTM, x, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def lstm_packed(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = batch_sizes.tolist()
    return _run(LSTM, data, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional, False, sizes)


def _gated(mode: int) -> Any:
    def run(
        x: torch.Tensor,
        hx: torch.Tensor,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, hidden, _ = _run(
            mode, x, hx, None, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
        return out, hidden

    return run


def gru_packed(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = batch_sizes.tolist()
    out, hidden, _ = _run(
        GRU, data, hx, None, params, has_biases, num_layers, dropout, train, bidirectional, False, sizes
    )
    return out, hidden


gru, rnn_tanh, rnn_relu = _gated(GRU), _gated(TANH), _gated(RELU)
