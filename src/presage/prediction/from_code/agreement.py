"""Two predictions of one step side by side: from the code, and from the job file that describes it; by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from presage.configs.job_file import ParsedJob
from presage.costs.kernel_model import OpTime
from presage.graph.graph import Graph
from presage.prediction.from_code.code_work import PARTS, Work, code_work, job_work, part_of
from presage.prediction.from_code.describe import CodeJob
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.efficiency import LAWS, shipped_efficiency
from presage.prediction.jobs.job_prediction import TRANSFERS, JobResult, predict_job
from presage.prediction.jobs.job_step import JobStep, StepInputs, step_at_clock
from presage.prediction.rank_set import RankBasis
from presage.prediction.step import StepResult
from presage.text import size

MS = 1e3
SHOWN = 0.005  # of the step: smaller differences need no cause
SAME = 0.02  # FLOPs and bytes this near each other are the same


class PartPair(NamedTuple):
    """Seconds of one part of the step in both predictions, and why they differ."""

    name: str
    code: float
    job: float
    why: str = ""


@dataclass(frozen=True, eq=False)
class CodeJobResult:
    """A step from its code and from its description."""

    code: StepResult
    job: JobResult
    described: CodeJob

    @property
    def difference(self) -> float:
        """The job's step over the code's, less one."""
        return self.job.step.p50 / self.code.step.p50 - 1

    @property
    def by_laws(self) -> float:
        """The same with a job step by kernel laws alone: what training runs lose to them, as fitted, left out."""
        return self._laws.seconds / self.code.step.p50 - 1

    @cached_property
    def _laws(self) -> JobStep:
        return step_at_clock(StepInputs.of(self.job.job, BlockCostModel(self.job.job, LAWS)), 1.0)

    @cached_property
    def parts(self) -> tuple[PartPair, ...]:
        """Parts that add up to both steps."""
        laws, job = self._laws.parts, self.job
        moved = sum(v for k, v in laws.items() if k in TRANSFERS)
        kernels = self._code_seconds()
        exposed, waits = self._code_communication(sum(kernels.values()))
        rest = self.code.step.p50 - sum(kernels.values()) - exposed - waits
        pairs = [
            *(PartPair(n, took, laws[n], self._why(n, took, laws[n])) for n, took in kernels.items()),
            PartPair("communication", exposed, moved, _SENT),
            PartPair("bubble", waits, laws["bubble"], "waits of the busiest stage"),
            PartPair("host", rest, laws["host"], _FSDP if job.job.parallel.fsdp else _HOST),
            PartPair("training", 0.0, job.seconds - self._laws.seconds, _training()),
            PartPair("jitter", 0.0, job.step.p50 - job.seconds, "drawn for jobs alone"),
        ]
        most = SHOWN * self.code.step.p50
        kept = [p for p in pairs if max(abs(p.code), abs(p.job)) > most / 5]
        return tuple(p._replace(why=p.why if abs(p.job - p.code) > most else "") for p in kept)

    def _code_communication(self, kernels: float) -> tuple[float, float]:
        """Seconds of exposed communication, with what kernels lose to transfers beside them; and of waits."""
        if self.code.many is None:
            return 0.0, 0.0
        kind = self.code.many.kinds[self._busiest]
        return kind.exposed + max(0.0, kind.compute - kernels), kind.wait

    @cached_property
    def _busiest(self) -> int:
        """Which of the code's different ranks computes most."""
        kinds = self.code.many.kinds if self.code.many else ()
        return max(range(len(kinds)), key=lambda k: kinds[k].compute, default=0)

    @cached_property
    def _step(self) -> tuple[Graph, tuple[OpTime, ...]]:
        """The captured step of that rank, with its kernel times."""
        basis = self.code.basis
        if not isinstance(basis, RankBasis):
            return self.code.graph, basis.times
        step = basis.team.kinds[self._busiest].step
        return basis.team.steps[step].graph, basis.team.times[step]

    def _code_seconds(self) -> dict[str, float]:
        out = dict.fromkeys(PARTS, 0.0)
        graph, times = self._step
        for op, t in zip(graph.ops, times, strict=True):
            if name := part_of(op):
                out[name] += t.seconds
        return out

    # ---- why parts differ

    def _why(self, name: str, code: float, seconds: float) -> str:
        mine, other = (works[name] for works in self._works)
        if name in ("products", "attention"):
            share = other.flops / mine.flops if mine.flops else 1.0
            same = "the same FLOPs" if abs(share - 1) < SAME else f"{share:.2f} times the FLOPs"
            rates = [f / t / 1e12 if t else 0.0 for f, t in ((mine.flops, code), (other.flops, seconds))]
            return f"{same}, at {rates[1]:,.0f} TFLOPS rather than {rates[0]:,.0f}"
        near = abs(other.moved - mine.moved) < SAME * mine.moved
        same = "the same traffic" if near else f"{size(other.moved)} of traffic rather than {size(mine.moved)}"
        rates = [b / t / 1e12 if t else 0.0 for b, t in ((mine.moved, code), (other.moved, seconds))]
        kernels = f", in {other.kernels:,.0f} kernels rather than {mine.kernels:,.0f}" if name == "streams" else ""
        return f"{same}, at {rates[1]:.2f} TB/s rather than {rates[0]:.2f}{kernels}"

    @cached_property
    def _works(self) -> tuple[dict[str, Work], dict[str, Work]]:
        return code_work(self._step[0]), job_work(self.job.job)

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        return {
            "kind": "described job",
            "source": self.code.source,
            "step_ms": {"code": self.code.step.p50 * MS, "job": self.job.step.p50 * MS},
            "difference": self.difference,
            "difference_by_laws": self.by_laws,
            "parts": {p.name: {"code_ms": p.code * MS, "job_ms": p.job * MS, "why": p.why} for p in self.parts},
            "description": self.described.table,
            "assumed": list(self.described.assumed),
            "unsaid": list(self.described.unsaid),
            "fits": self.code.fits,
            "job": self.job.to_json(),
            "code": self.code.to_json(),
            "notes": list(dict.fromkeys((*self.code.notes, *self.job.notes))),
        }


_HOST = "a job's host launches each pass by itself; the code's runs ahead of the GPU"

_SENT = "a job's transfers follow a law; the code's are simulated in their order, beside kernels that they slow down"
_FSDP = "a job has the host time of FSDP's hooks as measured; a capture has that of the ops in them alone"


def _training() -> str:
    e = shipped_efficiency()
    return (
        f"products take {e.product:.2f} times as long in training runs as by themselves, backward "
        f"{e.product * e.backward:.2f} (fitted on published runs), and GPUs at their power limit slow down"
    )


def compare_with_code(code: StepResult, described: CodeJob, parsed: ParsedJob) -> CodeJobResult:
    """Both predictions of a step."""
    return CodeJobResult(code, predict_job(parsed), described)
