"""Two predictions of one step side by side: from the code, and from the job file that describes it; by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from presage.configs.job_file import ParsedJob
from presage.costs.kernel_model import OpTime
from presage.graph import work
from presage.graph.families import family
from presage.graph.graph import Op
from presage.prediction.from_code.describe import CodeJob
from presage.prediction.jobs.block_cost import BlockCostModel
from presage.prediction.jobs.efficiency import LAWS, shipped_efficiency
from presage.prediction.jobs.job_prediction import TRANSFERS, JobResult, predict_job
from presage.prediction.jobs.job_step import UPDATE_BYTES, JobStep, StepInputs, step_at_clock
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


class Work(NamedTuple):
    """What kernels of a part do."""

    seconds: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0


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
        code, laws, job = self._code_work, self._laws.parts, self.job
        moved = sum(v for k, v in laws.items() if k in TRANSFERS)
        many = self.code.many
        exposed, waits = (many.exposed, many.wait) if many else (0.0, 0.0)
        kernels = {name: code[name].seconds for name in ("products", "attention", "streams", "optimizer")}
        rest = self.code.step.p50 - sum(kernels.values()) - exposed - waits
        pairs = [
            *(PartPair(name, seconds, laws[name], self._why(name, laws[name])) for name, seconds in kernels.items()),
            PartPair(
                "communication", exposed, moved, "what runs beside kernels is simulated in one, a law in the other"
            ),
            PartPair("bubble", waits, laws["bubble"], "waits of the busiest stage"),
            PartPair("host", rest, laws["host"], _HOST),
            PartPair("training", 0.0, job.seconds - self._laws.seconds, _training()),
            PartPair("jitter", 0.0, job.step.p50 - job.seconds, "drawn for jobs alone"),
        ]
        most = SHOWN * self.code.step.p50
        kept = [p for p in pairs if max(abs(p.code), abs(p.job)) > most / 5]
        return tuple(p._replace(why=p.why if abs(p.job - p.code) > most else "") for p in kept)

    # ---- why parts differ

    def _why(self, name: str, seconds: float) -> str:
        mine, other = self._code_work[name], self._job_work[name]
        if name in ("products", "attention"):
            share = other.flops / mine.flops if mine.flops else 1.0
            same = "the same FLOPs" if abs(share - 1) < SAME else f"{share:.2f} times the FLOPs"
            rates = (mine.flops / mine.seconds, other.flops / seconds) if mine.seconds and seconds else (0.0, 0.0)
            return f"{same}, at {rates[1] / 1e12:,.0f} TFLOPS rather than {rates[0] / 1e12:,.0f}"
        kernels = f" in {other.kernels:,.0f} kernels, not {mine.kernels:,.0f}" if name == "streams" else ""
        return f"{size(other.moved)} of traffic rather than {size(mine.moved)}{kernels}"

    @cached_property
    def _code_work(self) -> dict[str, Work]:
        graph, out = self.code.graph, dict.fromkeys(("products", "attention", "streams", "optimizer"), Work())
        for op, t in zip(graph.ops, self.code.basis.times, strict=True):
            if name := _part_of(op, t):
                old = out[name]
                flops = work.useful_flops(graph, op) if name == "attention" else work.flops(graph, op)
                moved = work.bytes_touched(graph, op).total
                add = t.seconds, float(flops), float(moved), float(t.launches)
                out[name] = Work(*(a + b for a, b in zip(old, add, strict=True)))
        return out

    @cached_property
    def _job_work(self) -> dict[str, Work]:
        out = dict.fromkeys(("products", "attention", "streams", "optimizer"), Work())
        for r in self.job.roofline:
            old = out[r.family]
            out[r.family] = Work(*(a + b for a, b in zip(old, (r.seconds, r.flops, r.moved, r.calls), strict=True)))
        job = self.job.job
        share = job.sharding if job.parallel.zero else 1
        held = job.model.parameters / (job.parallel.tp * job.parallel.pp * share)
        out["optimizer"] = Work(moved=held * UPDATE_BYTES.get(job.optimizer, 38.0))
        return out

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


def _training() -> str:
    e = shipped_efficiency()
    return (
        f"products take {e.product:.2f} times as long in training runs as by themselves, backward "
        f"{e.product * e.backward:.2f} (fitted on published runs), and GPUs at their power limit slow down"
    )


def _part_of(op: Op, t: OpTime) -> str | None:
    if t.family == "communication" or not t.launches:
        return None
    if op.phase == "optimizer":
        return "optimizer"
    kind = family(op.name)
    return {"matrix multiply": "products", "attention": "attention"}.get(kind, "streams")


def compare_with_code(code: StepResult, described: CodeJob, parsed: ParsedJob) -> CodeJobResult:
    """Both predictions of a step."""
    return CodeJobResult(code, predict_job(parsed), described)
