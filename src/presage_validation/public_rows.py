"""Rows of a table of public training runs, as what to build, how it was spread over ranks, and on which machines.

What a framework does is told by its documentation and sources, not by the times in the table:

    llm_foundry     Composer's FSDP, one block a unit, parts and updates in float32. Mode DEFAULT gathers in bfloat16
                    and sends gradients in float32, mode PURE both in bfloat16. Every microbatch sends its gradients
    torchtitan      FSDP2, parts, updates and sent gradients in float32, work in bfloat16
    neusight_train  Megatron-LM: all gradients in one buffer, sent when the backward pass is over; tensor parallelism
                    shares out embedding, head and loss too, and fills up the vocabulary to a multiple of 128 a rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.parallel.strategy import Strategy, strategy
from presage_validation.public_table import platform_name, read_table
from presage_validation.score import Skipped

__all__ = ["Setup", "read_setups", "setup"]

FAMILIES = {"llm_foundry": "mpt", "torchtitan": "llama", "neusight_train": "gpt"}
COLUMNS = ("source_key", "gpu", "n_gpus")
SIZES = {
    "batch": "micro_batch",
    "sequence": "seq_len",
    "width": "hidden",
    "heads": "heads",
    "layers": "layers",
    "ffn": "ffn",
    "vocab": "vocab",
}
ONE_BUFFER = {"bucket_cap_mb": "1000000", "first_bucket_mb": "1000000"}
GIB = 2**30


@dataclass(frozen=True)
class Setup:
    """One measured run: the step of one rank to build, and what the ranks do with it."""

    line: int  # of the table
    name: str
    source: str
    gpu: str
    model: str
    arguments: Mapping[str, Any]  # of the builder, for one microbatch
    platform: str
    ranks: int
    strategy: Strategy
    accumulate: int  # microbatches a step
    seconds: float  # measured, a step
    memory: float | None  # measured, bytes

    @property
    def key(self) -> tuple[tuple[str, Any], ...]:
        """Runs of one key share a capture."""
        return tuple(sorted(self.arguments.items()))


def read_setups(path: str | Path) -> tuple[list[Setup], list[Skipped]]:
    """The runs of a table that presage can predict, and why it cannot the others."""
    found: list[Setup] = []
    skipped: list[Skipped] = []
    for line, row in read_table(Path(path), COLUMNS):
        try:
            found.append(setup(row, line))
        except PresageError as e:
            skipped.append(Skipped(f"line {line}", str(e)))
    return found, skipped


def setup(row: Mapping[str, str], line: int = 0) -> Setup:
    """A row as a setup; raises with the reason where it is none that presage can predict."""
    _check(row)
    accumulate = _accumulate(row)
    seconds = _number(row, "step_time_s") or _number(row, "step_time_s_derived")
    if not seconds:
        raise PresageError("no step time")
    memory = _number(row, "peak_mem_gib")
    return Setup(
        line=line,
        name=_name(row),
        source=row["source_key"],
        gpu=row["gpu"],
        model=row["model"],
        arguments=_arguments(row),
        platform=platform_name(row["gpu"], _whole(row, "gpus_per_node")),
        ranks=_whole(row, "n_gpus"),
        strategy=_strategy(row),
        accumulate=accumulate,
        seconds=seconds,
        memory=memory * GIB if memory else None,
    )


def _check(row: Mapping[str, str]) -> None:
    """Reasons to leave a row out, the plainest first."""
    source, recompute = row["source_key"], row.get("recompute")
    if source not in FAMILIES:
        raise PresageError(f"models of {source} are not built here")
    if _whole(row, "n_gpus") == 1:
        raise PresageError("one GPU: there are no ranks")
    if _whole(row, "n_gpus") > _whole(row, "gpus_per_node"):
        raise PresageError("more than one node")
    if "fp8" in row.get("precision", ""):
        raise PresageError("fp8 kernels are not modelled")
    for column, what in (("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        if (_number(row, column) or 1) > 1:
            raise PresageError(f"{what} parallelism is not supported")
    if "compile" in row.get("framework", ""):
        raise PresageError("compiled code cannot be captured")
    if recompute not in ("none", "full"):
        raise PresageError(f"recompute {recompute or 'not stated'} is not built here")


def _arguments(row: Mapping[str, str]) -> dict[str, Any]:
    family = FAMILIES[row["source_key"]]
    sizes = {name: _whole(row, column) for name, column in SIZES.items()}
    if family == "gpt":
        multiple = 128 * _whole(row, "tp")
        sizes["vocab"] = -(-sizes["vocab"] // multiple) * multiple
    grouped = _number(row, "kv_heads") not in (None, sizes["heads"])
    if family == "llama":
        sizes["kv_heads"] = _whole(row, "kv_heads")
    elif grouped:
        raise PresageError(f"grouped queries are not built here for {family}")
    return {"family": family, **sizes, "recompute": row["recompute"] == "full"}


def _accumulate(row: Mapping[str, str]) -> int:
    """Microbatches a step."""
    whole, each = _whole(row, "global_batch"), _whole(row, "micro_batch") * _whole(row, "dp")
    if whole % each:
        raise PresageError("microbatches of different sizes")
    return whole // each


def _strategy(row: Mapping[str, str]) -> Strategy:
    tensor, sharded = _whole(row, "tp"), "fsdp" in row.get("fsdp_zero", "").lower()
    if row["source_key"] == "neusight_train":
        found = strategy("tp") if tensor > 1 and _whole(row, "dp") == 1 else strategy("ddp", ONE_BUFFER, tensor)
        return replace(found, vocabulary=tensor > 1)
    if not sharded or tensor > 1:
        raise PresageError("only fully sharded data parallelism is built here for this framework")
    sent = "bfloat16" if "MP mode PURE" in row.get("notes", "") else "float32"
    return strategy("fsdp", {"master_dtype": "float32", "reduce_dtype": sent})


def _name(row: Mapping[str, str]) -> str:
    how = f"tp{row['tp']} dp{row['dp']}" if row["tp"] != "1" else "fsdp" if "fsdp" in row["fsdp_zero"] else "dp"
    batch = f"{row['micro_batch']}/{row['global_batch']}"
    again = " recompute" if row["recompute"] == "full" else ""
    return f"{row['model']} {row['n_gpus']}x{row['gpu']} {how} seq {row['seq_len']} batch {batch}{again}"


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    try:
        return float(text) if text else None
    except ValueError:
        raise PresageError(f"{column} is {text!r}, no number") from None


def _whole(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)
    if value is None:
        raise PresageError(f"{column} is not stated")
    if not 1 <= value < 1e15 or value != int(value):
        raise PresageError(f"{column} is {row[column]}, no whole number above 0")
    return int(value)
