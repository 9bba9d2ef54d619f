"""The embedding model of a GPU: groups of tables to seconds, and sums of terms to seconds for searches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.lookup_law import (
    AT,
    LookupCorrection,
    backward_seconds,
    correction_features,
    forward_seconds,
    lookup_terms,
    lookup_traffic,
)
from presage.costs.lookups.row_reuse import Lookups
from presage.costs.lookups.table import Table, table_arrays
from presage.errors import InputError, PresageError
from presage.files.reading import DATA
from presage.hardware import Gpu, gpu

Array = npt.NDArray[Any]
OPTIMIZERS = ("rowwise_adagrad", "sgd")
LENGTHS = ("fixed", "poisson")
# What each parameter scales with from GPU to GPU; latencies and kernel starts stay.
KINDS = [f"{k}{h}" for k in range(4) for h in ("", "h")]
BYTES = ("memory", "through", "output", "sort", "runs", "gradient", "update", "check_lookups", "walk_lookups")
WORK = (*(f"{name}{k}" for name in ("row", "short", "long") for k in range(4)), "block", "short_more", "check_steps",
        "check_bags", "walk_steps", "walk_bags")  # fmt: skip
WARPS = ("resident", *(f"warps{k}" for k in KINDS))
VERSION = 1
MEASURED_ON = "h200"
SHIPPED = DATA / MEASURED_ON / "embeddings.json"


@dataclass(frozen=True)
class LookupParameters:
    """The law's parameters on the GPU they were measured on, and what is learned beyond it."""

    params: Mapping[str, float]
    forward: LookupCorrection | None
    backward: LookupCorrection | None
    source: str = ""
    seen: frozenset[str] = frozenset()  # marks of the groups it was fitted on


@lru_cache(4)
def load_lookup_parameters(path: Path = SHIPPED) -> LookupParameters:
    try:
        value = json.loads(path.read_text())
        if value["version"] != VERSION:
            raise InputError(path, f"is {value['version']}, this presage reads {VERSION}; fit it again", "version")
        there, back = (LookupCorrection.from_json(value[n]) if value[n] else None for n in ("forward", "backward"))
        return LookupParameters(dict(value["params"]), there, back, str(value["source"]), frozenset(value["seen"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(path, f"not a file of embedding parameters ({e})") from e


@dataclass(frozen=True)
class EmbeddingModel:
    """Times of FBGEMM's table-batched embeddings on one GPU, where all tables of a rank are one group."""

    gpu: Gpu
    params: Mapping[str, float]
    corrections: Mapping[str, LookupCorrection | None]
    source: str = ""

    def forward(
        self,
        tables: Sequence[Table],
        batch: float,
        *,
        optimizer: str = "rowwise_adagrad",
        lengths: str = "fixed",
        cold: bool = False,
    ) -> float:
        """Seconds to look up and pool a batch, index check included; `cold`: other work evicted the cache."""
        table_terms = self.terms(tables, batch, optimizer=optimizer, lengths=lengths)
        return float(self.forward_of(table_terms.sum(axis=0), cold=cold))

    def backward(
        self,
        tables: Sequence[Table],
        batch: float,
        *,
        optimizer: str = "rowwise_adagrad",
        lengths: str = "fixed",
        cold: bool = False,
    ) -> float:
        """Seconds for the gradients of a batch and the update of the rows it used."""
        table_terms = self.terms(tables, batch, optimizer=optimizer, lengths=lengths)
        return float(self.backward_of(table_terms.sum(axis=0), cold=cold))

    def terms(
        self,
        tables: Sequence[Table],
        batch: float,
        *,
        optimizer: str = "rowwise_adagrad",
        lengths: str = "fixed",
        lookups: Sequence[Lookups] | None = None,
    ) -> Array:
        """[tables, terms]: the sum over the tables that a rank holds is all that its time depends on."""
        for what, given, there in (("optimizer", optimizer, OPTIMIZERS), ("lengths", lengths, LENGTHS)):
            if given not in there:
                raise PresageError(f"{what} {given!r}: choose from {', '.join(there)}")
        arrays = table_arrays(tables, batch, lookups)
        return lookup_terms(lookup_traffic(arrays, self.params, optimizer != "sgd", lengths != "fixed"), self.params)

    def forward_of(self, total: Array, *, cold: bool = False, corrected: bool = True) -> Array:
        """Seconds from sums of terms [..., terms]; without the learned correction ten times as many a second."""
        return self._of(forward_seconds, "forward", total, cold, corrected)

    def backward_of(self, total: Array, *, cold: bool = False, corrected: bool = True) -> Array:
        return self._of(backward_seconds, "backward", total, cold, corrected)

    def _of(self, law: Callable[..., Array], name: str, total: Array, cold: bool, corrected: bool) -> Array:
        seconds = law(total, self.params, cold)
        correction = self.corrections.get(name)
        if corrected and correction is not None:
            seconds = seconds * correction(correction_features(total, self.params))
        return np.where(total[..., AT["lookups"]] > 0, seconds, 0.0)


def embedding_model(chip: Gpu | str = MEASURED_ON, fitted: LookupParameters | None = None) -> EmbeddingModel:
    """The model as shipped (fitted on the H200) or as given; on other GPUs scaled by L2, bandwidth and warps."""
    there = chip if isinstance(chip, Gpu) else gpu(chip)
    fitted = fitted or load_lookup_parameters()
    params = scale_parameters(fitted.params, gpu(MEASURED_ON), there)
    return EmbeddingModel(there, params, {"forward": fitted.forward, "backward": fitted.backward}, fitted.source)


def scale_parameters(params: Mapping[str, float], measured: Gpu, chip: Gpu) -> dict[str, float]:
    """The parameters on another GPU."""
    warps = (chip.sms * chip.threads_per_sm) / (measured.sms * measured.threads_per_sm)
    factor = dict.fromkeys(BYTES, measured.memory_bandwidth / chip.memory_bandwidth)
    factor |= dict.fromkeys(WORK, 1 / warps) | dict.fromkeys(WARPS, warps)
    factor |= {"cache": chip.l2 / measured.l2, "kept": chip.l2 / measured.l2, "sms": chip.sms / measured.sms}
    return {name: value * factor.get(name, 1.0) for name, value in params.items()}
