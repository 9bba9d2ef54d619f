"""What blocks cost on one rank: seconds by kind of work, and what the power limit and the host need to know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from presage.configs.job import Job
from presage.costs.closed_form import Chip
from presage.costs.collectives import Collectives
from presage.costs.collectives.group import Group
from presage.costs.overlap import channels, contention
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.parallel.plan import Axis
from presage.prediction.jobs.communicators import communicators
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.ops import Attend, Op, Product, Stream, Talk
from presage.prediction.jobs.plan_cache import known_of, layer_key
from presage.prediction.jobs.work_pace import EVEN, Paces, pace_of

__all__ = ["Cost", "Pricer", "held"]

USUALLY_HELD = 0.2  # of the multiprocessors, where channels are not known
REACHED, DRAWN, WAVES = 0.75, 0.35, 8.0  # of a link by collectives; of memory by large products; rounds of tiles


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds at the full clock by kind; transfers as far as nothing hides them."""

    product: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    weight: float = 0.0  # of the products, those for gradients of weights
    flops: float = 0.0  # of products
    attention_flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, o: Cost) -> Cost:
        return Cost(
            self.product + o.product, self.attention + o.attention, self.stream + o.stream, self.tp + o.tp,
            self.cp + o.cp, self.ep + o.ep, self.weight + o.weight, self.flops + o.flops,
            self.attention_flops + o.attention_flops, self.nbytes + o.nbytes,
        )  # fmt: skip

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.product * times, self.attention * times, self.stream * times, self.tp * times, self.cp * times,
            self.ep * times, self.weight * times, self.flops * times, self.attention_flops * times,
            self.nbytes * times,
        )  # fmt: skip

    def slower(self, times: float) -> Cost:
        """With products that take so many times as long."""
        return replace(self, product=self.product * times, weight=self.weight * times)

    def seconds(self, slowdown: float = 1.0) -> float:
        """On the GPU; tensor-core kernels slowed down by the power limit."""
        return (self.product + self.attention) * slowdown + self.stream + self.tp + self.cp + self.ep

    @property
    def compute(self) -> float:
        return self.product + self.attention + self.stream


@lru_cache(256)
def held(gpu: Gpu) -> float:
    """What compute loses while a collective runs beside it: of large products, the usual kernels of training."""
    try:
        used = channels(gpu)
    except PresageError:
        used = round(USUALLY_HELD * gpu.sms)
    received = REACHED * (gpu.link or gpu.pcie)
    beside = contention(gpu, bytes_per_second=received, channels=used, computes=True, memory_share=DRAWN, waves=WAVES)
    return 1 - 1 / beside.compute


class Pricer:
    """Prices blocks of one job, with some classes of work at another pace than usual."""

    def __init__(self, job: Job, efficiency: Efficiency, paces: Paces = EVEN) -> None:
        self.job, self.e, self.paces = job, efficiency, paces
        self.known, self.layers = known_of(job, efficiency, paces), layer_key(job)
        self.chip = Chip.of(job.platform.gpu)
        self.collectives = Collectives.of(job.platform)
        self.groups = communicators(job)
        self.held = held(job.platform.gpu)
        self.backward = 1.0 if job.precision == "fp32" else efficiency.backward

    def cost(self, ops: Iterable[Op]) -> Cost:
        """Of all of them, one after the other."""
        total = Cost()
        for op in ops:
            total += self.one(op)
        return total

    def one(self, op: Op) -> Cost:
        """Of one op."""
        if isinstance(op, Product):
            return self._product(op)
        if isinstance(op, Stream):
            took = self.chip.stream(op.nbytes, op.launches, op.kind) * self.paces.streams
            return Cost(stream=took, nbytes=op.nbytes)
        if isinstance(op, Attend):
            return self._attend(op)
        return self._talk(op)

    def _product(self, op: Product) -> Cost:
        took = self._product_seconds(op)
        flops = 2.0 * op.m * op.n * op.k * op.groups * op.batch
        width = 4 if op.kind in ("fp32", "tf32") else 1 if op.kind in ("fp8", "mxfp8") else 2
        moved = float(width * op.groups * op.batch) * (op.m * op.k + op.n * op.k + op.m * op.n)
        return Cost(product=took, weight=took if op.sums else 0.0, flops=flops, nbytes=moved)

    def _product_seconds(self, op: Product) -> float:
        """As in training; the efficiency is that of tensor cores, which fp32 does not use."""
        return self._law(op) * (1.0 if op.kind == "fp32" else self.e.product) * self.paces.products

    def _law(self, op: Product) -> float:
        kept = self.job.framework.gradient_bytes
        sums = op.sums and kept == 4
        if op.groups > 1:
            took = self.chip.grouped(op.groups, op.m, op.n, op.k, op.kind, sums)
        else:
            took = self.chip.product(op.m, op.n, op.k, op.kind, op.batch, op.sums, op.along, sums)
        if op.sums and kept == 2:  # a kernel of its own adds them up
            took += self.chip.stream(6.0 * op.groups * op.m * op.n)
        return took

    def _attend(self, op: Attend) -> Cost:
        kind = "fp16" if self.job.precision == "fp16" else "bf16"
        took = self.chip.attention(
            op.batch, op.heads, op.kv_heads, op.queries, op.keys, op.dim, op.value_dim,
            op.causal, op.window, op.backward, op.style, kind,
        )  # fmt: skip
        seen = op.keys * (0.5 if op.causal else 1.0)
        seen = min(seen, op.window) if op.window else seen
        flops = 2.0 * op.batch * op.heads * op.queries * seen * (op.dim + op.value_dim) * (2.5 if op.backward else 1.0)
        return Cost(attention=took * self.paces.attention, attention_flops=flops)

    def talk_seconds(self, op: str, nbytes: float, over: Axis) -> float:
        """A collective by itself."""
        alone = float(self.collectives.seconds(op, nbytes, self.groups[over]))
        return alone if self.paces is EVEN else alone * pace_of(self.paces, self.job, over)

    def _talk(self, op: Talk) -> Cost:
        alone = self.dispatch(op.nbytes) if op.over is Axis.EP else self.talk_seconds(op.op, op.nbytes, op.over)
        return Cost(**{op.over.value: self._left(op, alone)})

    def dispatch(self, nbytes: float) -> float:
        """Tokens to the ranks of their experts. In two steps a token crosses the network once for each domain that has
        one of its experts, however many it has there."""
        group, e = self.groups[Axis.EP], self.job.model.experts
        if group.domains == 1 or e is None or not self.job.framework.two_step_dispatch:
            return self.talk_seconds("all_to_all", nbytes, Axis.EP)
        domains, chosen = group.domains, e.top_k
        copies = domains * (1 - (1 - 1 / domains) ** chosen) / chosen
        across = self.collectives.seconds("all_to_all", nbytes * copies, Group(domains, 1))
        within = self.collectives.seconds("all_to_all", nbytes, Group(group.per_domain, group.per_domain))
        return float(max(across, within)) * self.paces.ep

    def _left(self, op: Talk, alone: float) -> float:
        """What is left of a transfer that runs beside a product or attention: cut into as many parts as there are
        ranks, the first (or last) of which has nothing to hide behind; or as a whole, holding some multiprocessors."""
        o, by = self.job.overlap, op.beside
        cut = o.tensor if op.over is Axis.TP else o.context
        if by is None or not (cut or (op.whole and self.job.framework.async_backward)):
            return alone
        cover = self._attend(by).attention if isinstance(by, Attend) else self._product_seconds(by)
        if not cut:
            return max(0.0, alone - cover) + self.held * min(alone, cover)
        part: float = 1 / self.groups[op.over].ranks
        return max(alone * part, alone - cover * (1 - part))
