"""The answer of `presage job` for a reinforcement-learning step: phases, waits, memory of both sides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.prediction.post_training.splits import policy_text
from presage.report.answer import Answer, Fact, Section, data_table, sections_of
from presage.report.html.charts.bars import GIB, parts_figure, stacks_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.terms import (
    MEMORY,
    TAIL_HELP,
    count_text,
    gpu_basis,
    share_of,
    signed,
    step_interval,
    step_text,
    step_time,
)
from presage.text import percent, seconds, size

if TYPE_CHECKING:
    from presage.prediction.post_training.step import PostTrainingResult

PHASES = {
    "rollout": "rollout",
    "reward": "reward",
    "old_log_probs": "old log-probabilities",
    "reference": "reference log-probabilities",
    "values": "values",
    "critic_training": "critic training",
    "training": "training",
    "transfer": "weights to the engine",
}
ENGINE = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "activations": "activations and sampling",
    "graphs": "CUDA graphs",
    "outside": "CUDA context and NCCL",
}
MARKED = (0.5, 0.95)


def post_training_answer(p: PostTrainingResult) -> Answer:
    name = p.job.name or p.job.model.name or "job"
    sections = sections_of(
        _phases_section(p), _waits_section(p), _rollout_section(p), _spread_section(p), _memory_section(p)
    )  # fmt: skip
    return Answer(
        title=name,
        question="How long will a reinforcement-learning step take?",
        subject=f"{name}, {count_text(p.job.model.parameters)} parameters, on {_where(p)}\n{_setup(p)}",
        headline=headline(p),
        verdict=verdict(p),
        verdict_tone="good" if p.fits else "bad",
        facts=_facts(p),
        sections=sections,
        notes=(p.model_error.note, *p.notes),
        to_data=p.to_json,
        basis=gpu_basis(p.job.platform.gpu),
    )


def headline(p: PostTrainingResult) -> str:
    longest, took = p.bound, p.breakdown[p.bound]
    return (
        f"{step_text(p.step)}: {p.tokens_per_second_per_gpu:,.0f} tokens/s/GPU; {PHASES[longest]} takes longest, "
        f"{share_of(took, float(p.draws.mean()))}."
    )


def verdict(p: PostTrainingResult) -> str:
    """Do trainer and engine fit, and how much do steps differ?"""
    trainer = _margin("trainer", p.trainer_margin)
    engine = f"{_margin('engine', p.engine_margin)}, KV cache of {p.engine_memory.kv_tokens:,} tokens"
    text = f"{trainer}; {engine}; steps vary with response lengths: p95 {signed(p.jitter)} over p50"
    return f"{text[0].upper()}{text[1:]}{'' if p.fits else '; times are what they would be if it fitted'}."


def _margin(who: str, margin: float) -> str:
    return (
        f"{who} fits with {size(margin)} to spare" if margin >= 0 else f"{who} does NOT fit: {size(-margin)} too little"
    )


def _where(p: PostTrainingResult) -> str:
    gpu = f"{p.job.platform.gpu.name} ({p.job.platform.key})"
    if p.rl.colocated:
        return f"{p.gpus} x {gpu}, trainer and engine on all"
    return f"{p.gpus} x {gpu}: {p.job.gpus} train, {p.rl.engine.gpus} decode"


def _setup(p: PostTrainingResult) -> str:
    rl, e, q = p.rl, p.rl.engine, p.job.parallel
    plan = [f"{k} {v}" for k, v in (("tp", q.tp), ("pp", q.pp), ("cp", q.cp), ("ep", q.ep)) if v > 1]
    trainer = ", ".join([*plan, f"dp {p.job.dp}", "FSDP" if q.fsdp else f"ZeRO-{q.zero}" if q.zero else ""]).rstrip(
        ", "
    )
    updates = p.phases.batches.updates * rl.epochs
    return (
        f"{rl.algorithm}, {policy_text(rl.staleness)}: {rl.prompts:,} prompts x {rl.samples}, responses of "
        f"{rl.lengths.mean:,.0f} tokens (at most {rl.lengths.longest:,}); {e.name} with {e.replicas} replica"
        f"{'s' if e.replicas > 1 else ''} of tp {e.tp}, {e.precision}; trainer {trainer}, "
        f"{updates} update{'s' if updates > 1 else ''} of {rl.mini_batch:,}, {p.job.framework.key}"
    )


def _facts(p: PostTrainingResult) -> tuple[Fact, ...]:
    rollout = p.breakdown["rollout"]
    return (
        Fact("Step time", step_time(p.step), f"90% interval {step_interval(p.step)}"),
        Fact("Throughput", f"{p.tokens_per_second_per_gpu:,.0f}", "tokens/s/GPU"),
        Fact("Rollout", seconds(rollout), f"{p.decoded_per_second_per_gpu:,.0f} tokens/s/GPU decoded"),
        Fact("Training", seconds(p.breakdown["training"]), f"{p.phases.batches.updates * p.rl.epochs} updates"),
        Fact(
            "KV cache",
            f"{p.engine_memory.kv_tokens:,}",
            "tokens of a replica",
            "good" if p.engine_margin >= 0 else "bad",
        ),
    )


def _phases_section(p: PostTrainingResult) -> Section:
    total, draws = float(p.draws.mean()), p.by_phase
    where = {"rollout": f"{p.rl.engine.gpus} GPUs", "transfer": "trainer to engine", "reward": "trainer or CPU"}
    rows = [
        (PHASES[k], where.get(k, f"{p.job.gpus} GPUs"), seconds(v), percent(v / total), _late(draws[k]))
        for k, v in p.breakdown.items()
    ]
    beside = "" if not p.rl.staleness else "; rollout and trainer run at the same time"
    rows.append(("step", f"{p.gpus} GPUs", seconds(total), "100.0%", _late(p.draws)))
    table = data_table(
        f"Phases, mean of {len(p.draws):,} draws{beside}",
        ("phase", "on", "time", "share", "p95"),
        rows,
        text=2,
        bold=(-1,),
    )
    parts = [(PHASES[k], v) for k, v in p.breakdown.items()]
    text = f"Where a step goes. {headline(p)}"
    return Section("Phases", (table,), partial(parts_figure, parts, total), text)


def _late(draws: NDArray[np.float64]) -> str:
    return seconds(float(np.quantile(draws, 0.95)))


def _waits_section(p: PostTrainingResult) -> Section:
    total = float(p.draws.mean())
    rows = [(name, seconds(max(0.0, v)), percent(max(0.0, v) / total)) for name, v in p.waits.items()]
    return Section("Who waits", (data_table("Who waits", ("who, for what", "time", "share"), rows),), None, "")


def _rollout_section(p: PostTrainingResult) -> Section:
    def mean(name: str) -> float:
        return float(np.mean([getattr(r, name) for r in p.rollouts]))

    batch, context = mean("batch"), p.rl.prompt_length + p.rl.lengths.mean / 2
    one, cache = (float(f(batch, batch * context)) for f in (p.decoding.seconds, p.decoding.attention_seconds))
    tail = share_of(mean("tail"), mean("seconds"), "the rollout")
    rows = [
        ("iterations", f"{mean('iterations'):,.0f}", "of the slowest replica"),
        ("mean batch", f"{batch:,.1f} sequences", f"at most {p.concurrent:,} of mean length at once"),
        ("iteration of that batch", seconds(one), f"KV cache {seconds(cache)}"),
        ("prefill", seconds(mean("prefill")), share_of(mean("prefill"), mean("seconds"), "the rollout")),
        ("tail", seconds(mean("tail")), f"last tenth of the responses, {tail}"),
    ]  # fmt: skip
    if mean("preempted"):
        rows.append(
            ("preempted", f"{mean('preempted'):,.0f} sequences", "the KV cache was full: they are prefilled again")
        )
    return Section("Rollout", (data_table("Rollout", ("", "", ""), rows, text=(0, 2), wrap=True),), None, "")


def _spread_section(p: PostTrainingResult) -> Section:
    marks = {q: float(np.quantile(p.draws, q)) for q in MARKED}
    drawn = f"p50 {seconds(marks[0.5])}, p95 {seconds(marks[0.95])}"
    text = f"{len(p.draws):,} steps drawn by their response lengths: {drawn}. {TAIL_HELP}"
    chart = partial(distribution_figure, p.draws, marks)
    return Section("Uncertainty", (distribution_table(p.draws),), chart, text, where="page")


def _memory_section(p: PostTrainingResult) -> Section:
    worst, engine = p.trainer_memory.worst, p.engine_memory
    trainer = {w: float(getattr(worst, k)) for k, w in MEMORY.items() if getattr(worst, k)}
    decoder = {w: max(0.0, float(getattr(engine, k))) for k, w in ENGINE.items()}
    names = list(dict.fromkeys([*trainer, *decoder]))
    kinds = {n: [trainer.get(n, 0.0), decoder.get(n, 0.0)] for n in names}
    limit = (f"GPU memory, {size(p.trainer_memory.memory)}", p.trainer_memory.memory)
    rows = [(n, *(size(v) if v else "" for v in values)) for n, values in kinds.items()]
    rows += [
        ("needed or allowed", size(worst.needed), size(engine.allowed)),
        ("left", *(size(m) if m >= 0 else f"-{size(-m)}" for m in (p.trainer_margin, p.engine_margin))),
    ]
    together = ", one after the other on the same GPUs" if p.rl.colocated else ""
    table = data_table("Memory per GPU", ("what", "trainer", "engine"), rows, bold=(-2, -1))
    text = f"Memory of the fullest GPU of each side{together}."
    return Section("Memory", (table,), partial(stacks_figure, ["trainer", "engine"], kinds, "side", GIB, limit), text)
