"""The claim on whole models on GPUs that were never calibrated: NeuSight's labelled transformers, float32 and eager.

A label is what a pass took between two CUDA events, forward and in training backward, the best five of 25, each begun
with an empty cache of memory: not the sum of the ops' times listed beside it, which its own code and the numbers say
(sums are 0.59 to 1.54 of labels). So a pass is the sum of its kernels, or, forward, the time the host needs to issue
them and to ask the driver for memory again, if that is longer. The loss is not timed, its gradient is.

Of kernels nothing is fitted on labels or on the times of their ops. Float32 products come from NeuSight's train tables
(A100 40 GB, P100, T4, V100) and our H200 (costs/single.py, costs/vector.py), other kernels from our H200
(costs/transfer.py): H100, L4 and A100 80 GB are in no fit. But they are not unseen: which effects are modelled at all
was decided over about ten rounds with these labels in view, Ada's energy among them (docs/labels.md has the errors
without these choices), so only cases that are not in the file tell how well it does. An allocation takes what it does
in published traces. For it belongs to a machine and not to its GPU, `train_machine` takes it from the other cases of
the same GPU, never from the one that is scored. The rate at which drivers wipe memory is taken from cases of other
architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from presage.costs.calibrated_kernels import CalibratedKernels, call_times
from presage.costs.call import Call
from presage.costs.kernel_files import load
from presage.costs.rates import power_relief
from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import read_json
from presage.hardware import Gpu, gpu
from presage.pool.pool import SERIAL, Pool
from presage_validation.label_models import NETS, LabelCase, tape
from presage_validation.label_ops import Tape
from presage_validation.score import AccuracyResult, Row, Skipped, run_cases

FILE = "labels.json"
MS = 1e-3
ISSUE = 1e-5  # seconds of the host for an op that launches
ALLOCATION = 2.5e-4  # seconds of a cudaMalloc: median in public traces where it is short, 2080 Ti to B200
HOST_BOUND = 1.1  # of the kernels' time, above which the host is taken to have set the pace
SCRUB_QUICKLY = ("Hopper", "Blackwell")  # copy engines with a way of their own to wipe memory
SECTOR = 8  # numbers that memory hands over at once
MODES = {"train": True, "inf": False}
MOST = 1 << 20  # of a batch, of a sequence
# NeuSight's own mean errors, recomputed from its published results over all its cases.
PEER = {"train": 0.104, "inference": 0.094, "fusion": 0.149}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Label:
    """One measured case."""

    gpu: Gpu
    name: str
    model: str
    case: LabelCase
    seconds: float
    forward: float  # zero where it is not told apart


@dataclass(frozen=True)
class Pass:
    """What is predicted of a case, in seconds. The host issues ops and asks for memory while the GPU works."""

    forward: float  # kernels
    backward: float
    waits: float  # the GPU idles while ops are issued one by one
    issue: float
    allocations: float  # how many
    wiped: float = 0.0  # bytes that the driver has to wipe before it can hand them out again

    def way_forward(self, allocation: float = ALLOCATION, wiping: float = float("inf")) -> float:
        """`wiping`: bytes a second."""
        return max(self.forward + self.waits, self.issue + self.allocations * allocation, self.wiped / wiping)

    def seconds(self, allocation: float = ALLOCATION, wiping: float = float("inf")) -> float:
        return self.way_forward(allocation, wiping) + self.backward


def score_labels(path: str | Path, tell: Tell = lambda _: None, pool: Pool = SERIAL) -> AccuracyResult:
    """Every case of one GPU; others are named."""
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    labels, skipped = read_labels(file)
    done, failed = run_cases(_predicted, labels, tell, lambda x: f"{x.gpu.key} {x.name}", pool)
    rows = [r for label, found in done for r in _rows(label, found, done)]
    return AccuracyResult("labels", str(path), tuple(rows), (*skipped, *failed))


def _predicted(label: Label) -> Pass:
    return predict(label.case, label.gpu)


def _rows(label: Label, p: Pass, all_: list[tuple[Label, Pass]]) -> Iterator[Row]:
    case = label.case
    metric = "train" if case.train else "fusion" if case.fused else "inference"
    elsewhere = [(o, q) for o, q in all_ if o.gpu.architecture != label.gpu.architecture]
    rate = wiping(elsewhere)
    row = Row(metric, label.gpu.key, label.name, p.seconds(wiping=rate), label.seconds, (label.model,))
    yield row
    if case.train:
        others = [(o, q) for o, q in all_ if o.gpu.key == label.gpu.key and o.case.train and o is not label]
        own = wiping(others) if wiping(others) < float("inf") else rate
        yield replace(row, metric="train_machine", predicted=p.seconds(allocation(others), own))
        if 0.0 < label.forward < label.seconds:
            yield replace(row, metric="train_forward", predicted=p.way_forward(wiping=rate), measured=label.forward)
            back = label.seconds - label.forward
            yield replace(row, metric="train_backward", predicted=p.backward, measured=back)


def allocation(others: Iterable[tuple[Label, Pass]]) -> float:
    """Seconds of an allocation on the machine of these cases: no way forward can be shorter than its allocations; where
    the one that says least is much longer than its kernels they must have set its pace."""
    found = [((o.forward - p.issue) / p.allocations, o, p) for o, p in others if o.forward > 0 and p.allocations > 1]
    if not found:
        return ALLOCATION
    least, label, p = min(found, key=lambda f: f[0])
    bound = label.forward > HOST_BOUND * (p.forward + p.waits)
    return max(0.0, least if bound else min(least, ALLOCATION))


def wiping(others: Iterable[tuple[Label, Pass]]) -> float:
    """Bytes a second at which the drivers of these cases wipe memory: the middle of those whose way forward took much
    longer than its kernels while there was memory to be wiped. Without one, they do so in no time."""
    found = [p.wiped / o.forward for o, p in others if p.wiped and o.forward > HOST_BOUND * (p.forward + p.waits)]
    return median(found) if found else float("inf")


# ---- predictions


def predict(case: LabelCase, chip: Gpu) -> Pass:
    """Float32 kernels of both ways on a GPU, at the clock its power allows on average."""
    ran, models = tape(case), _models(chip.key)
    forward, backward = (_kernels(models, calls) for calls in (ran.forward, ran.backward))
    products, others = (a + b for a, b in zip(forward, backward, strict=True))
    ease = power_relief(chip, products, others)
    ways = [ease * p + o for p, o in (forward, backward)]
    again = sum(n * nbytes for nbytes, n in ran.scattered if nbytes > chip.l2) * (SECTOR - 1) / models.rates.bandwidth
    host = ran.exposed * ISSUE, ran.launches * ISSUE, ran.allocations
    return Pass(ways[0] + again, ways[1], *host, _wiped(ran, chip))


def _wiped(ran: Tape, chip: Gpu) -> float:
    """What the next pass needs of the memory that one gave back: beyond what neither of them and nothing else holds.

    Drivers wipe memory that was given back before anyone gets it again, one copy engine's work: AMD's by a flag on all
    memory of compute (AMDGPU_GEM_CREATE_VRAM_WIPE_ON_RELEASE), NVIDIA's in its allocator of physical memory, which
    waits for its scrubber when nothing else is left (scrubCheckAndWaitForSize). Copy engines have a way of their own to
    do so from Hopper on (LAUNCH_DMA_MEMORY_SCRUB_ENABLE), which is taken to cost nothing.
    """
    if chip.architecture in SCRUB_QUICKLY:
        return 0.0
    untouched = chip.memory - ran.held - ran.given_back
    return max(0.0, ran.given_back - max(0.0, untouched))


@lru_cache(16)
def _models(key: str) -> CalibratedKernels:
    return load(key)


def _kernels(models: CalibratedKernels, calls: list[tuple[Call, int]]) -> tuple[float, float]:
    """Seconds of products, and of all else."""
    times = call_times(models, [c for c, _ in calls])
    totals = [0.0, 0.0]
    for (call, n), t in zip(calls, times, strict=True):
        totals[call.name not in PRODUCTS] += n * t.warm
    return totals[0], totals[1]


# ---- files


def read_labels(file: Path) -> tuple[list[Label], list[Skipped]]:
    """The cases that can be predicted, and the others with their reasons."""
    found = read_json(file)
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise InputError(file, "not a file of labels: cases by GPU are asked for")
    labels, skipped = [], []
    for device, cases in found.items():
        for name, entry in cases.items():
            try:
                labels.append(_label(device, name, entry))
            except WRONG_VALUE as e:
                reason = f"lacks {e}" if isinstance(e, KeyError) else str(e)
                skipped.append(Skipped(f"{device} {name}", reason))
    return labels, skipped


def _label(device: str, name: str, entry: Any) -> Label:
    if not isinstance(entry, dict):
        raise ValueError("not a case: its model, mode, batch and seq_len are asked for")
    option, model = entry.get("option"), str(entry["model"])
    if option not in (None, "", "fusion"):
        raise ValueError(f"option {option}: more than one GPU, which accuracy ranks scores, or not known")
    if model not in NETS:
        raise ValueError(f"model {model}: not known: choose from {', '.join(NETS)}")
    if entry["mode"] not in MODES:
        raise ValueError(f"mode {entry['mode']}: not known: choose from {', '.join(MODES)}")
    net = NETS[model]
    sizes = [_size(entry, k) for k in ("batch", "seq_len")]
    layers = _size(entry, "num_layer") if entry.get("num_layer") else net.layers
    case = LabelCase(net, sizes[0], sizes[1], MODES[entry["mode"]], layers, option == "fusion")
    seconds = MS * float(entry["e2e_latency"])
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"e2e_latency {entry['e2e_latency']}: not a time")
    return Label(_gpu(device), name, model, case, seconds, MS * float(entry.get("fw_latency") or 0.0))


def _size(entry: Mapping[str, Any], name: str) -> int:
    value = float(entry[name])
    if value != int(value) or not 0 < value <= MOST:
        raise ValueError(f"{name} {entry[name]}: not a size")
    return int(value)


@lru_cache(64)
def _gpu(device: str) -> Gpu:
    """By what its driver calls it, with underscores for spaces."""
    for name in (device, device.replace("_", " ")):
        try:
            return gpu(name)
        except PresageError:
            continue
    raise ValueError(f"no facts of this GPU: {device}")
