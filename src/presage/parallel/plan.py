"""ParallelPlan: every degree by which a job is spread over GPUs, and the equations they must satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from presage.errors import PresageError
from presage.parallel.dispatchers import dispatchers
from presage.parallel.orders import Route
from presage.parallel.schedules import SCHEDULES, ScheduleKind, schedule_kind, unknown_schedule

MOST = 10**8  # GPUs, and ranks along any axis
DEGREES = ("tp", "pp", "virtual", "cp", "ep", "expert_tp")  # keys of [parallel] that are taken over as they are


class Axis(StrEnum):
    """A set of ranks that communicate: its word in files and tables, and why there is traffic in it."""

    about: str

    def __new__(cls, word: str, about: str) -> Axis:
        member = str.__new__(cls, word)
        member._value_, member.about = word, about
        return member

    TP = "tp", "tensor parallel ranks share every matrix, and add up or gather activations in each layer"
    CP = "cp", "context parallel ranks share every sequence, and exchange keys and values in each layer"
    EP = "ep", "expert parallel ranks hold different experts, and send tokens to them"
    PP = "pp", "neighbouring pipeline stages hand on activations and their gradients"
    DP = "dp", "ranks with the same weights (data and context parallel) reduce gradients"
    SHARD = "shard", "of the DP ranks, those that share one copy of sharded state (ZeRO, FSDP, HSDP) gather it"
    REPLICAS = "replicas", "of the DP ranks, one of each such copy: they reduce what is sharded"
    EXPERT_DP = "expert_dp", "ranks with the same experts reduce their gradients"


LAYER_AXES = (Axis.TP, Axis.CP, Axis.EP)  # whose transfers are part of each layer


class DegreeError(PresageError):
    """Degrees that contradict each other: the key of [parallel] to change, and the equation."""

    def __init__(self, key: str, equation: str) -> None:
        self.key, self.equation = key, equation
        super().__init__(f"{key}: {equation}")


class SplitSizes(NamedTuple):
    """What a plan divides: GPUs, the batch, the sequence, the model."""

    gpus: int
    sequence: int
    micro_batch: int
    global_batch: int
    layers: int
    heads: int
    kv_heads: int  # 0: none to split (latent attention)
    ffn: int
    experts: int = 0  # 0: a dense model
    expert_ffn: int = 0


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How a model is spread. Data parallel replicas are what the other degrees leave over: gpus / (tp x pp x cp)."""

    tp: int = 1  # tensor parallel
    sequence_parallel: bool = False  # activations between tensor parallel blocks are split by sequence
    pp: int = 1  # pipeline stages
    virtual: int = 1  # chunks of layers on each stage
    schedule: str = "1f1b"  # one of SCHEDULES; with chunks: interleaved
    cp: int = 1  # context parallel: sequences split over ranks
    ep: int = 1  # expert parallel: experts spread over so many ranks
    expert_tp: int = 1  # and each expert split over so many
    zero: int = 0  # 0 none, 1 optimizer, 2 and gradients, 3 and parameters sharded (3 with `fsdp` is FSDP)
    fsdp: bool = False  # gathers by layer as PyTorch's FSDP, else as DeepSpeed or Megatron
    shard: int = 0  # ranks that share one copy of what is sharded (HSDP, ZeRO groups); 0: all data parallel ranks
    layers_as: tuple[int, ...] = ()  # layers of each (stage, chunk), chunk by chunk: empty for as even as can be
    ends_as_layers: bool = False  # embedding and head count as a layer each where layers are assigned to stages
    dispatcher: str = ""  # how tokens reach experts: one of `dispatchers()`; empty for the framework's

    # ---- ranks

    @property
    def replica_gpus(self) -> int:
        """GPUs of one data parallel replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    def dp(self, gpus: int) -> int:
        """Data parallel replicas on so many GPUs."""
        return gpus // (self.tp * self.pp * self.cp)

    def sharding(self, gpus: int) -> int:
        """Ranks that share one copy of the optimizer's state (ZeRO): context parallel ranks hold the same weights, so
        they are part of it."""
        return self.shard or self.dp(gpus) * self.cp

    def expert_dp(self, gpus: int) -> int:
        """Copies of an expert."""
        return self.dp(gpus) * self.cp * self.tp // (self.ep * self.expert_tp)

    def axes(self, gpus: int) -> dict[Axis, tuple[int, int]]:
        """Ranks of one communicator along each axis, and how far apart they are: TP ranks are neighbours, stages are
        farthest apart."""
        holders, shard = self.dp(gpus) * self.cp, self.sharding(gpus)
        return {
            Axis.TP: (self.tp, 1),
            Axis.CP: (self.cp, self.tp),
            Axis.EP: (self.ep, self.expert_tp),
            Axis.PP: (min(self.pp, 2), gpus // self.pp),
            Axis.DP: (holders, self.tp),
            Axis.SHARD: (min(shard, holders), self.tp),
            Axis.REPLICAS: (max(1, holders // shard), self.tp * shard),
            Axis.EXPERT_DP: (max(1, self.expert_dp(gpus)), self.expert_tp * self.ep),
        }

    @property
    def layer_degrees(self) -> tuple[int | str, ...]:
        """What the work of one layer on one rank depends on."""
        return self.tp, self.sequence_parallel, self.cp, self.ep, self.expert_tp, self.dispatcher

    @property
    def by_layer(self) -> bool:
        """Whether parameters and gradients are sent layer by layer in each pass, and not once a step."""
        return self.zero == 3 or self.fsdp

    # ---- stages

    @property
    def pipeline_kind(self) -> ScheduleKind:
        """The schedule that is run: with several chunks a stage another one than with one."""
        kind = schedule_kind(self.schedule)
        return schedule_kind(kind.with_chunks) if self.virtual > 1 else kind

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[stage][chunk]: the place of its layers in the model."""
        return _slots(self.pipeline_kind.route, self.pp, self.virtual)

    @property
    def slot_count(self) -> int:
        """Parts that the model's layers are split into."""
        return self.pp * self.virtual // SCHEDULES[self.schedule].route.copies

    @property
    def _slot_words(self) -> tuple[str, str]:
        """What the number of slots is made of, in words and in numbers."""
        if self.pipeline_kind.route.copies > 1:
            return "pp", str(self.pp)
        return "pp x virtual", f"{self.pp} x {self.virtual} = {self.slot_count}"

    def slot_layers(self, layers: int, predicted: int = 0) -> tuple[int, ...]:
        """How many of a model's layers each slot has; `predicted`: further tokens, a layer each."""
        return _assign_layers(layers, predicted, self.slot_count, self.layers_as, self.ends_as_layers)

    def stage_layers(self, layers: int, predicted: int = 0) -> tuple[tuple[int, ...], ...]:
        """How many of a model's layers each chunk of each stage has."""
        counts = self.slot_layers(layers, predicted)
        return tuple(tuple(counts[slot] for slot in chunks) for chunks in self.slots)

    def uneven_layers(self, layers: int, predicted: int = 0) -> str:
        """Why layers cannot be split evenly, as Megatron wants them; empty where they can."""
        slots, more = self.slot_count, 2 if self.ends_as_layers else 0
        if self.layers_as or (layers + more) % slots == 0:
            return ""
        counts = list(self.slot_layers(layers, predicted))
        total = f"{layers} + 2 = {layers + 2}" if more else str(layers)
        ends = f", or ends_as_layers = true ({layers} + 2 is one)" if not more and (layers + 2) % slots == 0 else ""
        name, sizes = self._slot_words
        what = f"layers = {name} x n: {total} is no multiple of {sizes}"
        return f"{what}; give layers_as = {counts}{ends}"

    # ---- equations

    def out_of_range(self, gpus: int) -> list[str]:
        """Degrees that are no number of ranks."""
        sizes = (gpus, self.tp, self.pp, self.virtual, self.cp, self.ep, self.expert_tp)  # DEGREES
        if min(sizes) >= 1 and max(sizes) <= MOST:
            return []  # nearly all of the many that a search asks about
        named = zip(("gpus", *DEGREES), sizes, strict=True)
        return [_range(name, value) for name, value in named if not 1 <= value <= MOST]

    def problems(self, of: SplitSizes) -> list[str]:
        """Every equation between degrees and what they divide that does not hold, with its numbers."""
        out = self.out_of_range(of.gpus)
        if out:  # no arithmetic with nonsense
            return out
        out = list(self._ranks(of))
        counted = not out  # what follows from replicas is of no use where their number is wrong
        out += [*self._tensor(of), *self._pipeline(of, counted), *self._context(of)]
        out += [*self._experts(of, counted), *self._sharding(of, counted)]
        return out

    def _ranks(self, of: SplitSizes) -> Iterator[str]:
        one = self.replica_gpus
        if of.gpus % one:
            sizes = f"{of.gpus} is no multiple of {self.tp} x {self.pp} x {self.cp} = {one}"
            yield f"gpus = tp x pp x cp x dp: {sizes}; {_near(of.gpus, one)}"
        elif of.global_batch % (each := of.micro_batch * (dp := of.gpus // one)):
            sizes = f"{of.global_batch} is no multiple of {of.micro_batch} x {dp} = {each}"
            yield f"global_batch = micro_batch x dp x microbatches: {sizes}; {_near(of.global_batch, each)}"

    def _tensor(self, of: SplitSizes) -> Iterator[str]:
        tp, kv = self.tp, of.kv_heads
        if tp == 1:
            if self.sequence_parallel:
                yield "sequence_parallel needs tp > 1: tp is 1"
            return
        if of.heads % tp:
            yield f"heads = tp x n: {of.heads} is no multiple of {tp}; tp may be {_divisors(of.heads, tp)}"
        if kv and kv % tp and tp % kv:
            yield f"kv_heads = tp x n, or tp = kv_heads x copies: {kv} and {tp} do not divide each other"
        if of.ffn % tp:
            yield f"ffn = tp x n: {of.ffn} is no multiple of {tp}"

    def _pipeline(self, of: SplitSizes, counted: bool) -> Iterator[str]:
        """Stages, chunks, the order of microbatches."""
        if self.schedule not in SCHEDULES:
            yield unknown_schedule(self.schedule)
            return
        if self.pp == 1 and self.virtual == 1 and not self.layers_as:
            return
        if self.virtual > 1 and self.pp == 1:
            yield f"virtual > 1 needs pp > 1: virtual is {self.virtual}, pp is 1"
        if SCHEDULES[self.schedule].interleaved and self.virtual == 1:
            yield f"schedule {self.schedule} needs virtual > 1: virtual is 1"
        if SCHEDULES[self.schedule].chunks == "two" and self.virtual != 2:
            yield f"schedule {self.schedule} needs virtual = 2: virtual is {self.virtual}"
            return
        if counted and self.pp > 1:
            yield from self._microbatches(of.global_batch // (of.micro_batch * self.dp(of.gpus)))
        yield from self._layers(of.layers)

    def _microbatches(self, count: int) -> Iterator[str]:
        kind = SCHEDULES[self.schedule]
        chunked = self.virtual > 1 and kind.chunks in ("one", "several")
        if chunked and count % self.pp:
            sizes = f"{count} is no multiple of {self.pp}; {_near(count, self.pp)}"
            yield f"microbatches = pp x n (interleaved): {sizes}"
        if misfit := kind.misfit(self.pp, count):
            yield misfit

    def _layers(self, layers: int) -> Iterator[str]:
        slots, ends = self.slot_count, 2 if self.ends_as_layers else 0
        given, (parts, sizes) = self.layers_as, self._slot_words
        if given:
            if len(given) != slots:
                yield f"layers_as has {parts} entries: {len(given)} is not {sizes}"
            if sum(given) != layers or min(given) < 0:
                yield f"layers = sum of layers_as: {layers} is not {' + '.join(map(str, given))} = {sum(given)}"
        elif slots > layers + ends:
            more = " + 2 (embedding and head)" if ends else ""
            yield f"{parts} <= layers{more}: {sizes} is more than {layers + ends}"

    def _context(self, of: SplitSizes) -> Iterator[str]:
        sequence, each = of.sequence, self.tp * self.cp
        if self.cp > 1 and sequence % (2 * self.cp):
            sizes = f"{sequence} is no multiple of 2 x {self.cp} = {2 * self.cp}"
            yield f"sequence = 2 x cp x n: {sizes}; {_near(sequence, 2 * self.cp)}"
        if self.sequence_parallel and sequence % each:
            sizes = f"{sequence} is no multiple of {self.tp} x {self.cp} = {each}"
            yield f"sequence = tp x cp x n (sequence parallel): {sizes}; {_near(sequence, each)}"

    def _experts(self, of: SplitSizes, counted: bool) -> Iterator[str]:
        if not of.experts:
            if self.ep > 1:
                yield f"ep > 1 needs a model with experts: ep is {self.ep}"
            if self.dispatcher:
                yield f"a dispatcher needs a model with experts: dispatcher is {self.dispatcher!r}"
            return
        if self.dispatcher and self.dispatcher not in dispatchers():
            yield f"dispatcher is {self.dispatcher!r}: choose from {', '.join(dispatchers())}"
        if of.experts % self.ep:
            may = _divisors(of.experts, self.ep)
            yield f"experts = ep x n: {of.experts} is no multiple of {self.ep}; ep may be {may}"
        if of.expert_ffn % self.expert_tp:
            yield f"width of an expert = expert_tp x n: {of.expert_ffn} is no multiple of {self.expert_tp}"
        have, need = of.gpus // self.pp, self.ep * self.expert_tp
        if counted and have % need:
            sizes = f"{self.dp(of.gpus)} x {self.cp} x {self.tp} = {have} is no multiple of"
            yield f"dp x cp x tp = ep x expert_tp x n: {sizes} {self.ep} x {self.expert_tp} = {need}"

    def _sharding(self, of: SplitSizes, counted: bool) -> Iterator[str]:
        if self.zero not in (0, 1, 2, 3):
            yield f"zero is 0, 1, 2 or 3: it is {self.zero}"
        if self.fsdp and self.zero < 2:
            yield f"fsdp shards gradients and parameters, so zero is 2 or 3: it is {self.zero}"
        dp = self.dp(of.gpus)
        if self.shard < 0:
            yield f"shard >= 0: it is {self.shard}"
        elif self.shard and counted and dp * self.cp % self.shard:
            yield f"dp x cp = shard x n: {dp} x {self.cp} = {dp * self.cp} is no multiple of {self.shard}"


def count_gpus(plan: ParallelPlan, gpus: int | None, dp: int | None) -> int:
    """GPUs in all, given as such or by the number of replicas."""
    one = plan.replica_gpus
    total = gpus if gpus is not None else one * (dp or 1)
    if dp is not None and dp * one != total:
        sizes = f"{plan.tp} x {plan.pp} x {plan.cp} x {dp} = {dp * one}"
        raise DegreeError("dp", f"gpus = tp x pp x cp x dp: {total} is not {sizes}")
    return total


def count_sharing(holders: int, shard: int | None, replicate: int | None) -> int:
    """Ranks that share one copy of what is sharded, given as such or by the number of copies (`replicate`)."""
    if replicate is None:
        return shard or 0
    each = shard or (holders // replicate if replicate > 0 else 0)
    if each * replicate != holders:
        raise DegreeError("replicate", f"dp x cp = shard x replicate: {holders} is not {each} x {replicate}")
    return each


@lru_cache(4096)
def _slots(route: Route, pp: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    return route.slots(pp, virtual)


@lru_cache(4096)
def _assign_layers(layers: int, predicted: int, slots: int, layers_as: tuple[int, ...], ends: bool) -> tuple[int, ...]:
    return layers_as or tuple(_even_layers(layers, predicted, slots, ends))


def _even_layers(layers: int, predicted: int, slots: int, ends: bool) -> list[int]:
    """As even as can be, the later slots with one less; embedding and head (with layers of its own, where further
    tokens are predicted) may take layers' places."""
    last = 1 + predicted if ends else 0
    total = layers + last + (1 if ends else 0)
    counts = [total // slots + (i < total % slots) for i in range(slots)]
    counts[0] -= 1 if ends else 0
    for i in reversed(range(slots)):  # from the end, where the last slot alone is too small
        taken = min(last, counts[i])
        counts[i], last = counts[i] - taken, last - taken
    return counts


def _range(name: str, value: int) -> str:
    return f"{name} >= 1: it is {value}" if value < 1 else f"{name} <= {MOST:,.0f}: it is {value}"


def _near(value: int, unit: int) -> str:
    """The multiples on both sides of a value."""
    low = value // unit * unit
    return f"try {low} or {low + unit}" if low else f"try {unit}"


def _divisors(value: int, near: int) -> str:
    """The divisors of a value on both sides of a degree that is none."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    low, high = max(d for d in divisors if d <= near), [d for d in divisors if d > near]
    return f"{low} or {high[0]}" if high else str(low)
