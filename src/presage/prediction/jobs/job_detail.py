"""What a JobResult computes on demand: roofline points, timeline, the step with work faster or slower, notes, JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from presage.configs.job import Job
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.closed_form.op_shapes import number_kind
from presage.costs.collectives import Collectives
from presage.engine import Program, Timeline, simulate
from presage.errors import PresageError
from presage.graph.graph import Op, argument
from presage.graph.work import bytes_moved
from presage.parallel.pipeline_run import pipeline_program
from presage.parallel.plan import Axis
from presage.prediction.breakdown import RooflinePoint
from presage.prediction.jobs.block_cost import BlockCost, BlockCostModel, communicators
from presage.prediction.jobs.efficiency import Efficiency, shipped_efficiency
from presage.prediction.jobs.job_flops import peak_of
from presage.prediction.jobs.job_host import job_host
from presage.prediction.jobs.job_step import JobStep, job_step
from presage.prediction.jobs.layer_graph import LayerGraph
from presage.prediction.jobs.recurrent_blocks import recurrent_note
from presage.prediction.jobs.stages import assign_layers, recomputed_share
from presage.prediction.jobs.transformer_layer import embedding_graph, further_graph, head_graph, layer_graph
from presage.prediction.jobs.work_pace import EVEN, PACED

if TYPE_CHECKING:
    from presage.memory import StageMemory
    from presage.prediction.jobs.cost import TrainingCost
    from presage.prediction.jobs.job_prediction import JobResult, StageSummary

Key = tuple[str, str, str]


def job_roofline(job: Job, step: JobStep, efficiency: Efficiency | None = None) -> tuple[RooflinePoint, ...]:
    """Kernels of one GPU of the busiest stage by block, phase and kind of work, longest first; without collectives.
    Recomputation counts as forward."""
    model = BlockCostModel(job, efficiency or shipped_efficiency())
    found: dict[Key, RooflinePoint] = {}
    for layer, times, recomputed in _layers(job, int(np.argmax(step.pipeline.busy))):
        costs, ops = model.op_costs(layer), layer.graph.ops
        for block in layer.blocks:
            again = recomputed_share(job.recompute, block.name, block.has_gemm) if recomputed else 0.0
            for places, often in ((block.forward, 1.0 + again), (block.backward, 1.0)):
                for i in places:
                    if not ops[i].group and times * often:
                        one = _one(model, step, layer, ops[i], costs[i])
                        _add(found, one, times * often)
    return tuple(sorted(found.values(), key=lambda r: -r.seconds))


def _layers(job: Job, stage: int) -> Iterator[tuple[LayerGraph, float, bool]]:
    """The graphs of a stage, how often each runs in a step, and whether it may be recomputed: never the ends."""
    d, m = assign_layers(job.model, job.parallel), job.model
    for (layers, first, last), count in zip(d.kinds, d.counts[stage].tolist(), strict=True):
        often = count * job.passes
        for number, times in layers:
            yield layer_graph(job, number), times * often, True
        if first:
            yield embedding_graph(job), often, False
        if last:
            yield head_graph(job), often, False
        if last and m.predicted:
            yield layer_graph(job, m.layers - 1), often * m.predicted, True
            yield further_graph(job), often * m.predicted, False


def _add(found: dict[Key, RooflinePoint], one: RooflinePoint, times: float) -> None:
    key = (one.name, one.phase, one.family)
    r = found.get(key, replace(one, calls=0.0, seconds=0.0, flops=0.0, moved=0.0, least=0.0))
    found[key] = replace(
        r,
        calls=r.calls + one.calls * times,
        seconds=r.seconds + one.seconds * times,
        flops=r.flops + one.flops * times,
        moved=r.moved + one.moved * times,
        least=r.least + one.least * times,
    )


def _one(model: BlockCostModel, step: JobStep, layer: LayerGraph, op: Op, cost: BlockCost) -> RooflinePoint:
    """The point of a single op."""
    gpu = model.job.platform.gpu
    if cost.stream:
        launches = argument(op, "launches")
        assert isinstance(launches, int)
        least = cost.nbytes / gpu.memory_bandwidth
        return RooflinePoint(op.module, "", op.phase, "streams", launches, cost.stream, 0.0, cost.nbytes, least, 0.0)
    if cost.product:
        factor = model.backward if op.phase == "backward" else 1.0
        peak = peak_of(gpu, number_kind(layer.graph, op, layer.graph.inputs_of(op)[-1]))[1]
        kind, seconds, flops, nbytes = "products", cost.product * factor, cost.flops, cost.nbytes
    else:
        peak, nbytes = peak_of(gpu, "bf16")[1], float(bytes_moved(layer.graph, op).total)
        kind, seconds, flops = "attention", cost.attention, cost.attention_flops
    least = max(flops / peak, nbytes / gpu.memory_bandwidth)
    return RooflinePoint(op.module, "", op.phase, kind, 1.0, seconds * step.slowdown, flops, nbytes, least, peak)


# ---- A job's step as a timeline of the engine: every microbatch on every stage, then replicas and optimizer.

MOST = 1_000_000  # tasks: more than a browser draws
TAIL = {"dp": "gradients and parameters between replicas", "optimizer": "optimizer"}


def job_timeline(step: JobStep) -> Timeline:
    """The timeline, one lane per stage; tasks after the pipeline last as long as they are exposed."""
    run = step.pipeline
    count = run.schedule.stages * run.schedule.virtual * run.schedule.microbatches * 2
    if count > MOST:
        raise PresageError(f"a timeline of {count:,} tasks is too long to draw: try a smaller training.global_batch")
    made, kind = pipeline_program(run.schedule, run.durations)
    seconds, _ = run.durations.kinds(run.schedule.meets)
    tail = [(name, float(step.parts.get(part, 0.0))) for part, name in TAIL.items() if step.parts.get(part, 0.0) > 0]
    return simulate(_with_tail(made, [name for name, _ in tail], run.total), _durations(made, seconds[kind], tail))


def _with_tail(made: Program, tail: list[str], begin: float) -> Program:
    """The same tasks on all lanes, from `begin` on."""
    stages, more = len(made.lanes), len(made.lanes) * len(tail)
    name = np.repeat(len(made.names) + np.arange(len(tail)), stages)
    return Program.of(
        made.lanes,
        np.concatenate([made.lane, np.tile(np.arange(stages), len(tail))]),
        made.edges,
        group=np.concatenate([made.group, np.full(more, -1)]),
        release=np.concatenate([made.release, np.full(more, begin)]),
        name=np.concatenate([made.name, name]),
        names=(*made.names, *tail),
    )


def _durations(made: Program, seconds: np.ndarray, tail: list[tuple[str, float]]) -> np.ndarray:
    return np.concatenate([seconds, np.repeat([took for _, took in tail], len(made.lanes))])


# ---- Step time with one class of work faster or slower.

BY = 0.1  # of its seconds
LEAST = 5e-5  # of the step: what moves it less does not matter


@dataclass(frozen=True, slots=True)
class WorkClassSensitivity:
    """A class of work of `WorkPaces`, and the step time with it faster and slower, in seconds."""

    name: str
    quicker: float
    slower: float


def perturb(job: Job, efficiency: Efficiency | None = None, by: float = BY) -> tuple[WorkClassSensitivity, ...]:
    """Classes of work that change the step, largest effect first."""
    now = job_step(job, efficiency).seconds
    found = []
    for name in PACED:
        paces = [EVEN._replace(**{name: times}) for times in (1 - by, 1 + by)]  # type: ignore[arg-type]
        ends = [job_step(job, efficiency, pace).seconds for pace in paces]
        found.append(WorkClassSensitivity(name, *ends))
    matter = (s for s in found if max(abs(s.quicker - now), abs(s.slower - now)) > LEAST * now)
    return tuple(sorted(matter, key=lambda s: s.quicker))


# ---- Which figures behind a job's step were not measured on its machines, in words.


def provenance_notes(job: Job) -> tuple[str, ...]:
    return (*_chip(job), *recurrent_note(job), *_collectives(job), *([job_host(job.host).note] if job.host else []))


def _chip(job: Job) -> list[str]:
    gpu = job.platform.gpu
    of = ClosedFormKernels.of(gpu).transferred
    return [f"no kernels of {gpu.name} were measured: how near they come to its peaks is taken from {of}"] if of else []


def _collectives(job: Job) -> list[str]:
    """Groups whose communication is modelled from link specs alone."""
    model, found = Collectives.of(job.platform), communicators(job)
    ops = {Axis.TP: _tensor(job), Axis.CP: "all_gather", Axis.EP: "all_to_all", Axis.PP: "send_recv"}
    ops[Axis.DP] = _replicas(job)
    names = [name for name, op in ops.items() if found[name].ranks > 1 and model.origin(op, found[name]) == "composed"]
    told = ", ".join(names)
    return (
        [f"{told} communication is modelled from link specs (no measurements for {job.platform.key})"] if told else []
    )


def _tensor(job: Job) -> str:
    return "all_gather" if job.parallel.sequence_parallel else "all_reduce"


def _replicas(job: Job) -> str:
    return "reduce_scatter" if job.parallel.zero else "all_reduce"


# ---- JSON

MS = 1e3
HELPS = 8


def job_to_json(p: JobResult, tokens: float | None = None) -> dict[str, Any]:
    run = {} if tokens is None else {"run": _run(p.spent(tokens))}
    return {
        "kind": "job",
        "name": p.job.name,
        "model": _model(p),
        "platform": p.job.platform.key,
        "gpu": p.job.platform.gpu.key,
        "gpus": p.job.gpus,
        "parallel": _parallel(p),
        **_speed(p),
        **p.verdict_json(),
        "bound": p.bound,
        "breakdown": {name: {"ms": s * MS, "share": s / p.step.p50} for name, s in p.step_parts.items()},
        "stages": [_stage(s, m) for s, m in zip(p.stages, p.memory.stages, strict=True)],
        "memory": _memory(p),
        **_spending(p),
        **run,
        **({"distribution": p.spread.to_json()} if p.spread else {}),
        "notes": list(p.notes),
    }


def _model(p: JobResult) -> dict[str, Any]:
    m = p.job.model
    return {"name": m.name, "parameters": m.parameters, "active_parameters": m.active_parameters}


NAMES = {"sequence_parallel": "sequence"}  # keys that are called otherwise in answers


def _parallel(p: JobResult) -> dict[str, Any]:
    job = p.job
    return {
        **{NAMES.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in asdict(job.parallel).items()},
        "dp": job.dp,
        "microbatches": job.microbatches,
    }


def _speed(p: JobResult) -> dict[str, Any]:
    return {
        "step_ms": {name: value * MS for name, value in asdict(p.step).items()} | {"point": p.seconds * MS},
        "tokens_per_step": p.job.tokens,
        "tokens_per_second": p.tokens_per_second,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "samples_per_second": p.samples_per_second,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "mfu_by_peak": p.mfu_by_peak,
        "peak": p.peak[0],
        "flop_convention": p.convention,
        "model_flops": p.flops.model,
        "hardware_flops": p.flops.hardware,
        "model_tflops_per_second_per_gpu": p.flops_per_gpu / 1e12,
    }


def _stage(s: StageSummary, m: StageMemory) -> dict[str, Any]:
    return {
        "stage": s.number,
        "layers": s.layers,
        "forward_ms": s.forward * MS,
        "backward_ms": s.backward * MS,
        "busy_ms": s.busy * MS,
        "bubble_ms": s.bubble * MS,
        "memory_bytes": s.memory,
        "memory": {(k if k == "microbatches" else f"{k}_bytes"): v for k, v in asdict(m).items()},
    }


def _memory(p: JobResult) -> dict[str, Any]:
    m = p.memory
    return {
        "fits": m.fits,
        "needed_bytes": m.needed,
        "peak_bytes": m.peak,
        "peak_is": m.reported_as,
        "gpu_bytes": m.memory,
        "margin_bytes": m.margin,
        "surely_fits": m.surely_fits,
        "stage": m.stages.index(m.worst),
        "parts_bytes": p.memory_parts,
        "helps": [_help(p, i) for i in range(min(HELPS, len(p.helps)))],
    }


def _help(p: JobResult, i: int) -> dict[str, Any]:
    h = p.helps[i]
    cost = {"flags": h.flags, "step_time_change": p.help_costs[i]}
    return {"change": h.change, "saved_bytes": h.saved, "margin_bytes": h.margin, "fits": h.fits} | cost


def _spending(p: JobResult) -> dict[str, Any]:
    s, t = p.spent(), p.terms
    cost = None if s.cost is None else {"per_step": s.cost, "price_per_gpu_hour": t.price}
    energy = {
        "J_per_step": s.energy,
        "J_per_token": s.energy / s.tokens,
        "W_per_gpu": p.watts / p.job.gpus,
        "pue": t.pue,
    }
    return {"energy": energy, "cost": cost}


def _run(s: TrainingCost) -> dict[str, Any]:
    return {
        "tokens": s.tokens,
        "steps": s.steps,
        "days": s.days,
        "gpu_hours": s.gpu_hours,
        "kWh": s.kwh,
        "cost": s.cost,
    }
