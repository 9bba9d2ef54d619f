"""What software adds to the laws: figures of data/post_training.toml, with how they were fitted."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from presage.files.reading import shipped_toml
from presage.prediction.result import ModelError

MS = 1e-3


class SoftwareCosts(NamedTuple):
    """Host seconds of an iteration of an engine, and the trainer's pace."""

    iteration: float
    ranks: float  # more, where a replica has several
    trainer: float  # times as long as pretraining


@cache
def software_costs() -> SoftwareCosts:
    """The figures that ship."""
    table = shipped_toml("post_training.toml")
    return SoftwareCosts(table["engine"]["base"] * MS, table["engine"]["parallel"] * MS, table["trainer"]["pace"])


@cache
def step_error() -> ModelError:
    """presage's own error on published steps that no figure was fitted to."""
    return ModelError(**shipped_toml("post_training.toml")["error"])
