"""Shell completion of option values.

It runs at every key press, so nothing heavy is imported: files are listed by name, and words defined in heavy modules
are repeated here (tests compare them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

CONDITIONS = ("screened", "production", "unscreened")
CONVENTIONS = ("6N + causal attention", "full attention", "6N")
OBJECTIVES = ("mean", "cost", "p95")
OPTIMIZERS = ("rowwise_adagrad", "sgd")
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp")
TRACE_EDITS = ("cuda_graph", "no_sync", "faster", "host", "overlap")
EDITS = (
    "cuda_graph", "fused_adam", "foreach_adam", "table_batched", "checkpoint", "accumulate", "no_sync", "faster",
    "overlap", "compile", "fused_chains", "tf32", "bf16", "autocast", "fused_attention", "channels_last", "fp8", "gpu",
    "host", "batch", "seq",
)  # fmt: skip
Complete = Callable[[str], list[str]]


def one_of(words: Iterable[str]) -> Complete:
    """Complete to one of the words."""
    every = tuple(words)
    return lambda incomplete: [w for w in every if w.startswith(incomplete)]


def comma_list(words: Iterable[str]) -> Complete:
    """Complete to a comma-separated list of the words."""
    every = tuple(words)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{w}" for w in every if w.startswith(last)]

    return complete


def edits(incomplete: str) -> list[str]:
    """Complete names of edits, and GPU names after `gpu=`."""
    before, comma, last = incomplete.rpartition(",")
    if last.startswith("gpu="):
        return [f"{before}{comma}gpu={name}" for name in gpus(last.removeprefix("gpu="))]
    return comma_list(EDITS)(incomplete)


def gpus(incomplete: str) -> list[str]:
    return _stems("hardware/gpus", incomplete)


def platforms(incomplete: str) -> list[str]:
    return _stems("hardware/platforms", incomplete)


def hosts(incomplete: str) -> list[str]:
    return [*_stems("hardware/hosts", incomplete), *one_of(["unknown"])(incomplete)]


def failures(incomplete: str) -> list[str]:
    return _stems("data/runs", incomplete)


def _stems(folder: str, incomplete: str) -> list[str]:
    """Names of data files that ship with presage."""
    package = find_spec("presage")
    if package is None or not package.submodule_search_locations:
        return []
    found = (Path(package.submodule_search_locations[0]) / folder).glob("*.toml")
    return sorted(f.stem for f in found if f.stem.startswith(incomplete))
