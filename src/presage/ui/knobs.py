"""Knobs: the settings of a plan and the values they can have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

from presage.errors import PresageError
from presage.parallel.schedules import SCHEDULES

KEPT = "as in the TOML"  # a word of controls: what the job's own text says is more than a control can
LARGEST = 1_000_000_000
LONGEST = 200  # letters of a word
SHARDINGS = {
    "none": (0, False), "ZeRO-1": (1, False), "ZeRO-2": (2, False), "ZeRO-3": (3, False), "FSDP": (3, True),
    "FSDP, parameters kept": (2, True),
}  # fmt: skip
RECOMPUTES = ("none", "selective", "every-2", "full")
PIPELINES = ("auto", *(kind.name for kind in SCHEDULES.values() if not kind.interleaved))


class InvalidPlan(PresageError):
    """A plan that cannot run, and the knobs to change."""

    def __init__(self, problem: str, knobs: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.knobs = knobs


@dataclass(frozen=True)
class Knob:
    """`kind`: word, count or price; `group` is where it stands on the page."""

    name: str
    label: str
    kind: str
    group: str
    about: str = ""
    words: tuple[str, ...] = ()


KNOBS = (
    Knob("model", "Model", "word", "What", "A known model, or the one in the TOML"),
    Knob("platform", "Cluster", "word", "What", "The platform"),
    Knob("gpus", "GPUs", "count", "What", "Total number of GPUs"),
    Knob("tp", "Tensor", "count", "Parallelism", "Tensor parallel (tp)"),
    Knob("pp", "Pipeline", "count", "Parallelism", "Pipeline stages (pp)"),
    Knob("cp", "Context", "count", "Parallelism", "Context parallel (cp)"),
    Knob("ep", "Experts", "count", "Parallelism", "Expert parallel (ep)"),
    Knob("virtual", "Chunks", "count", "Parallelism", "Model chunks per stage (virtual stages)"),
    Knob("schedule", "Schedule", "word", "Parallelism", "Pipeline schedule", PIPELINES),
    Knob("sharding", "Sharded state", "word", "Parallelism", "ZeRO or FSDP",
         tuple(SHARDINGS)),
    Knob("global_batch", "Batch", "count", "Training", "Global batch, samples per step"),
    Knob("micro_batch", "Microbatch", "count", "Training", "Samples per microbatch of a replica"),
    Knob("sequence", "Sequence", "count", "Training", "Tokens per sample"),
    Knob("precision", "Precision", "word", "Training", "Precision of the GEMMs",
         ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")),
    Knob("recompute", "Recompute", "word", "Training", "Activation recomputation",
         RECOMPUTES),
    Knob("framework", "Framework", "word", "Training", "Training framework"),
    Knob("price", "Price", "price", "Training", "Price per GPU-hour"),
)  # fmt: skip


@cache
def knob(name: str) -> Knob:
    return next(k for k in KNOBS if k.name == name)


def parse_value(k: Knob, given: Any) -> Any:
    """The value of a control, checked: a page may send anything."""
    if k.kind == "price":
        return None if given in (None, "") else _price(given)
    if k.kind == "count":
        return _count(k, given)
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST:
        raise InvalidPlan(f"{k.label}: choose one", (k.name,))
    return given


def _count(k: Knob, given: Any) -> int:
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else None
    if number is None or not isfinite(number) or number != int(number) or not 1 <= number <= LARGEST:
        raise InvalidPlan(f"{k.label}: write a whole number from 1 to {LARGEST:,}", (k.name,))
    return int(number)


def _price(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e6:
        raise InvalidPlan("Price: write a number, such as 2.5, or leave it empty", ("price",))
    return float(given)


# Words of presage's sentences, and the knobs they are about.
MEANT = {
    "gpus": "gpus", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "virtual": "virtual", "schedule": "schedule",
    "global_batch": "global_batch", "batch": "global_batch", "micro_batch": "micro_batch",
    "microbatches": "global_batch", "sequence": "sequence", "precision": "precision", "recompute": "recompute",
    "framework": "framework", "zero": "sharding",
    "fsdp": "sharding", "shard": "sharding", "platform": "platform", "model": "model", "heads": "tp", "experts": "ep",
    "price_per_gpu_hour": "price",
}  # fmt: skip


def knobs_named_in(sentence: str) -> tuple[str, ...]:
    """Those that the first clause of a sentence names: `heads = tp x n: 12 is no multiple of 8`."""
    first = sentence.split("(and ")[0].partition(": ")[0]
    found = [MEANT[w] for w in first.replace(".", " ").replace(",", " ").split() if w in MEANT]
    if "has no" in sentence and not found:
        found = ["precision"]
    return tuple(dict.fromkeys(found))
