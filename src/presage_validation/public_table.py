"""The table of public runs: its rows, the numbers in them, and the platforms its GPUs are on."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError
from presage.files.reading import lines
from presage.hardware import Gpu, Platform, cluster, gpu, gpu_by_name, platforms
from presage.hardware.cluster import usual_network
from presage.parallel.strategy import Strategy, strategy
from presage_validation.score import Skipped

MOST = 10_000_000  # of what a row counts
USUAL_NODE = 8
TRAY = 8  # cards that are counted are those of a tray, where a node is said to be a whole rack
PCIE_TWIN = {"a100_40gb": "a100_pcie_40gb", "a100_80gb": "a100_pcie_80gb", "h100_sxm": "h100_pcie"} | {
    "v100_16gb": "v100_pcie_32gb",
    "v100_32gb": "v100_pcie_32gb",
}


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows with their lines; the table must have these columns."""
    try:
        table = csv.DictReader(lines(path), restval="")
        missing = [c for c in columns if c not in (table.fieldnames or ())]
        if missing:
            raise InputError(path, "no such column", missing[0])
        yield from enumerate(table, 2)
    except csv.Error as e:
        raise InputError(path, str(e)) from e


def run_seconds(row: Mapping[str, str]) -> float:
    """Measured seconds of a step."""
    found = number(row, "step_time_s") or number(row, "step_time_s_derived")
    if not found:
        raise PresageError("no step time")
    return found


def number(row: Mapping[str, str], column: str) -> float | None:
    """What a column says, above 0; None where it says nothing."""
    text = row.get(column, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        raise PresageError(f"{column} is {text!r}, not a number") from None
    if found is not None and not 0 < found < inf:
        raise PresageError(f"{column} is {text}: it should be above 0")
    return found


def count(row: Mapping[str, str], column: str, default: int | None = None, most: int = MOST) -> int:
    """A number from 1 on; where a row says nothing or 0, the default."""
    text = row.get(column, "").strip()
    if default is not None and text in ("", "0"):
        return default
    try:
        found = float(text)
    except ValueError:
        raise PresageError(f"{column} is {text!r}, not a number") from None
    if not 1 <= found <= most:
        raise PresageError(f"{column} is {text}: it should be between 1 and {most:,}")
    return int(found)


def platform_name(gpu: str, per_node: int) -> str:
    """The platform that ships with presage with so many of a GPU in a node."""
    found = platform_of_run(gpu, per_node)
    if found not in platforms():
        raise PresageError(f"no platform has {per_node} {gpu} a node")
    return found.key


@cache
def platform_of_run(gpu_text: str, per_node: int = 0, interconnect: str = "") -> Platform:
    """The platform of a run as a table describes it: the GPU's name, GPUs a node (0: not said), and the links."""
    chip, size = gpu_by_name(gpu_text), per_node or USUAL_NODE
    said = read_interconnect(interconnect, size, usual_network(chip, size) / size)
    if said.pcie_only and "sxm" not in gpu_text.lower():
        chip = gpu(PCIE_TWIN.get(chip.key, chip.key))
    tray = said.cards if said.cards and said.cards <= TRAY < size else size
    domain = _domain(chip, said, tray, size)
    return cluster(chip, tray, said.node_Gbps, fabric=said.fabric or "infiniband", domain=domain, nics=said.cards)


def _domain(chip: Gpu, said: Interconnect, tray: int, size: int) -> int | None:
    """GPUs that share NVLink, where that is not a node: a rack that is named, or counted as a node."""
    named = said.domain if chip.link and said.domain and said.domain % tray == 0 else None
    return named or (size if tray < size else None)


# What a text says of the links between GPUs: "NVLink3+8xHDR200 IB", "1600G RoCE/node", "NVL72 + IB", "n/a".
#
# Cards are counted where it says how many, else a rate is the node's where it says so or is more than one card has, and
# a GPU's where it says so or is what is usual for the GPU. Storage, PCIe and NVLink's own rates are left aside.

# The first word that fits tells the kind of network.
KINDS = (
    (r"omni-?path|\bopa", "omnipath"),
    (r"\befa|elastic fabric|\bp4d|\bp5", "efa"),
    (r"slingshot|cassini", "slingshot"),
    (r"roce|rdma|spectrum", "roce"),
    (r"infini-?band|\bib\b|[xnhef]dr(?![a-z])", "infiniband"),
    (r"tcp|ethernet|\bgbe\b|gige", "ethernet"),
)
# Gb/s of a card by its name, where no number is given.
CARDS = (
    (r"xdr|connect-?x-?8|\bcx-?8", 800.0),
    (r"ndr|connect-?x-?7|\bcx-?7|bluefield-?3|\bbf-?3", 400.0),
    (r"hdr|connect-?x-?6|\bcx-?6|slingshot", 200.0),
    (r"edr|connect-?x-?5|\bcx-?5|omni-?path|\bopa", 100.0),
    (r"fdr", 56.0),
)
INSTANCES = {"p4de": 400.0, "p4d": 400.0, "p5en": 3200.0, "p5": 3200.0}  # Gb/s a node of Amazon's
RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(TB|GB|Tb|Gb|T|G|g)(?:it)?(?:/s|ps|E)?(?![a-z])")
NAMED_RATE = re.compile(r"(?:[xnhef]dr|omni-?path|opa)[\s-]*(\d{2,4})", re.IGNORECASE)
COUNT = re.compile(r"(?<![\w.])(\d{1,3})\s*[x×*](?![a-z]{0,2}\d*\s*pcie)\s*", re.IGNORECASE)
OWN_LINKS = re.compile(
    r"(?:nvlink|nvswitch|xgmi|infinity fabric|pcie|c2c)[-\s]?(?:gen)?\s?\d*(?:\.0)?(?:\s*x\s*\d+)?[\s(:,]*"
    r"(?:[\d.]+\s*[GT]B(?:/s|ps)\)?)?",
    re.IGNORECASE,
)
LARGEST_CARD = 800.0
SCALE = {"TB": 8000.0, "GB": 8.0, "Tb": 1000.0, "T": 1000.0, "Gb": 1.0, "G": 1.0, "g": 1.0}


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What was said; None where nothing was."""

    node_Gbps: float | None = None
    fabric: str | None = None
    cards: int | None = None  # in a node
    domain: int | None = None  # GPUs that share NVLink
    pcie_only: bool = False  # PCIe is named, and no link between GPUs


def read_interconnect(text: str, per_node: int, usual_Gbps: float) -> Interconnect:
    """Read a text about nodes of so many GPUs, whose usual network is so many Gb/s a GPU."""
    network = _network(text)
    lower = network.lower()
    fabric = next((kind for pattern, kind in KINDS if re.search(pattern, lower)), None)
    cards, rate = _cards(network, per_node, usual_Gbps)
    if fabric == "ethernet" and rate is None:  # no rate: of the host's own cards nothing is said, GPUs have theirs
        fabric = "roce"
    domain = re.search(r"nvl[-\s]?(\d{1,3})(?!\d)", text.lower())
    pcie = "pcie" in text.lower() and not re.search(r"nvl|xgmi|infinity", text.lower())
    return Interconnect(rate, fabric, cards, int(domain[1]) if domain else None, pcie)


def _network(text: str) -> str:
    """The part of a text that is of the network for training."""
    compute = re.search(r"compute\s*:\s*(.*)", text, re.IGNORECASE)
    kept = compute[1] if compute else re.sub(r"storage\s*:[^;]*", "", text, flags=re.IGNORECASE)
    parts = [p for p in re.split(r"[;+|]", kept) if not re.search(r"bandwidth for gpu|pcie-nic", p, re.IGNORECASE)]
    return OWN_LINKS.sub(" ", " + ".join(parts))


def _cards(text: str, per_node: int, usual: float) -> tuple[int | None, float | None]:
    """Cards of a node where they are counted, and Gb/s of a node."""
    for part in text.split(" + "):
        count, rate = COUNT.search(part), _rate(part)
        if count and rate and int(count[1]):
            return int(count[1]), int(count[1]) * rate
        if rate:
            return None, _of_node(part, rate, per_node, usual)
    return None, None


def _rate(part: str) -> float | None:
    """Gb/s that a part of the text names: with a unit, after the name of a network, or by the name of a card."""
    found = RATE.search(part)
    if found:
        return float(found[1]) * SCALE[found[2]]
    named = NAMED_RATE.search(part)
    if named:
        return float(named[1])
    lower = part.lower()
    instance = next((rate for name, rate in INSTANCES.items() if re.search(rf"\b{name}\b", lower)), None)
    return instance or next((rate for pattern, rate in CARDS if re.search(pattern, lower)), None)


def _of_node(part: str, rate: float, per_node: int, usual: float) -> float:
    """A rate that stands alone: a GPU's, a node's, or a card's, of which there is one or one a GPU."""
    lower = part.lower()
    if re.search(r"(/|per|a|each)\s*-?\s*(gpu|accelerator|card|nic|port)", lower):
        return rate * per_node
    if re.search(r"(/|per|a|each)\s*-?\s*(node|host|server|machine|instance)", lower) or rate > LARGEST_CARD:
        return rate
    return rate * per_node if rate == usual else rate


# ---- Rows of a table of public training runs, as what to build, how it was spread over ranks, and on which machines

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
    seconds = run_seconds(row)
    memory = number(row, "peak_mem_gib")
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
        if count(row, column, 1) > 1:
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
    grouped = number(row, "kv_heads") not in (None, sizes["heads"])
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


def _whole(row: Mapping[str, str], column: str) -> int:
    value = number(row, column)
    if value is None:
        raise PresageError(f"{column} is not stated")
    if value < 1 or value != int(value):
        raise PresageError(f"{column} is {row[column]}, no whole number above 0")
    return int(value)
