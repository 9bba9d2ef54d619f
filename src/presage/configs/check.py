"""Is a Job possible? Every equation between its degrees, said with its numbers when it does not hold."""

from __future__ import annotations

from presage.configs.job import PRECISIONS, SCHEDULES, Job
from presage.configs.limits import job_limits, model_limits
from presage.errors import PresageError

__all__ = ["MODULES", "OPTIMIZERS", "check", "problems", "supported"]

MODES = ("none", "selective", "full")
MODULES = ("core_attn", "norm", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "op")
OPTIMIZERS = ("adam", "adamw", "adam-16bit", "sgd", "momentum", "lion", "muon", "adagrad", "none")
NEEDED = {"tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
SINCE = {"mxfp8": "Blackwell or CDNA 4", "nvfp4": "Blackwell"}  # where a peak alone does not tell
MICROSCALING = ("Blackwell", "CDNA 4", "Rubin")


def check(job: Job) -> None:
    """Raises with the first equation that does not hold, the others after it."""
    found = problems(job)
    if found:
        more = f" (and {'; '.join(found[1:])})" if len(found) > 1 else ""
        raise PresageError(found[0] + more)


def problems(job: Job) -> list[str]:
    """All that is wrong with a job, in words; empty for one that can be run. Never raises."""
    out = [*model_limits(job.model), *job_limits(job)]
    if out:  # no arithmetic with nonsense
        return out
    _ranks(job, out)
    dealt = not out  # ranks and samples: what follows from them is of no use where they are wrong
    _tensor(job, out)
    _pipeline(job, dealt, out)
    _context(job, out)
    if job.model.experts or job.parallel.ep > 1:
        _experts(job, dealt, out)
    _sharding(job, dealt, out)
    _numbers(job, out)
    return out


def _ranks(job: Job, out: list[str]) -> None:
    """GPUs and samples."""
    p, gpus, batch = job.parallel, job.gpus, job.global_batch
    one = p.tp * p.pp * p.cp  # a replica's
    if gpus % one:
        out.append(
            f"gpus = tp x pp x cp x dp: {gpus} is no multiple of {p.tp} x {p.pp} x {p.cp} = {one}; {_near(gpus, one)}"
        )
    elif batch % (job.micro_batch * (dp := gpus // one)):
        each = job.micro_batch * dp
        out.append(
            f"global_batch = micro_batch x dp x microbatches: {batch} is no multiple of {job.micro_batch} x {dp} = "
            f"{each}; {_near(batch, each)}"
        )
    reach = job.platform.links[-1].ranks
    if gpus > reach:
        out.append(f"gpus <= those of the platform: {gpus} is more than the {reach} of {job.platform.key}")


def _tensor(job: Job, out: list[str]) -> None:
    """What tensor parallelism splits."""
    m, tp = job.model, job.parallel.tp
    if tp == 1:
        if job.parallel.sequence:
            out.append("sequence_parallel needs tp > 1: tp is 1")
    else:
        if m.heads % tp:
            out.append(f"heads = tp x n: {m.heads} is no multiple of {tp}; tp may be {_divisors(m.heads, tp)}")
        if m.latent is None and m.kv_heads % tp and tp % m.kv_heads:
            out.append(f"kv_heads = tp x n, or tp = kv_heads x copies: {m.kv_heads} and {tp} do not divide each other")
        if m.ffn % tp:
            out.append(f"ffn = tp x n: {m.ffn} is no multiple of {tp}")
    if m.latent is None and m.heads % m.kv_heads:
        out.append(f"heads = kv_heads x n: {m.heads} is no multiple of {m.kv_heads}")


def _pipeline(job: Job, dealt: bool, out: list[str]) -> None:
    """Stages, chunks, the order of microbatches."""
    p = job.parallel
    if p.schedule not in SCHEDULES:
        out.append(f"schedule is {p.schedule!r}: there is {', '.join(SCHEDULES)}")
    if p.pp == 1 and p.virtual == 1 and not p.layers_as:
        return
    if p.virtual > 1 and p.pp == 1:
        out.append(f"virtual > 1 needs pp > 1: virtual is {p.virtual}, pp is 1")
    if p.schedule == "interleaved" and p.virtual == 1:
        out.append("schedule interleaved needs virtual > 1: virtual is 1")
    interleaved = p.virtual > 1 and p.pp > 1 and p.schedule in ("1f1b", "interleaved")  # 1f1b with chunks is, too
    if interleaved and dealt and (count := job.microbatches) % p.pp:
        out.append(f"microbatches = pp x n (interleaved): {count} is no multiple of {p.pp}; {_near(count, p.pp)}")
    _layers(job, out)


def _layers(job: Job, out: list[str]) -> None:
    """Layers of stages."""
    p, layers = job.parallel, job.model.layers
    slots, ends = p.pp * p.virtual, 2 if p.ends_as_layers else 0
    if p.layers_as:
        if len(p.layers_as) != slots:
            out.append(f"layers_as has pp x virtual entries: {len(p.layers_as)} is not {p.pp} x {p.virtual} = {slots}")
        if sum(p.layers_as) != layers or min(p.layers_as) < 0:
            out.append(
                f"layers = sum of layers_as: {layers} is not {' + '.join(map(str, p.layers_as))} = {sum(p.layers_as)}"
            )
    elif slots > layers + ends:
        more = " + 2 (embedding and head)" if ends else ""
        out.append(f"pp x virtual <= layers{more}: {p.pp} x {p.virtual} = {slots} is more than {layers + ends}")


def _context(job: Job, out: list[str]) -> None:
    """What splits sequences."""
    m, p, sequence = job.model, job.parallel, job.sequence
    if p.cp > 1 and sequence % (2 * p.cp):
        out.append(
            f"sequence = 2 x cp x n: {sequence} is no multiple of 2 x {p.cp} = {2 * p.cp}; {_near(sequence, 2 * p.cp)}"
        )
    if p.sequence and sequence % (p.tp * p.cp):
        each = p.tp * p.cp
        out.append(
            f"sequence = tp x cp x n (sequence parallel): {sequence} is no multiple of {p.tp} x {p.cp} = {each}; "
            f"{_near(sequence, each)}"
        )
    if m.positions == "learned" and 0 < m.max_positions < sequence:
        out.append(f"sequence <= max_positions: {sequence} is more than {m.max_positions} learned positions")
    if m.window < 0 or m.window_every < 1:
        out.append(f"window >= 0 and window_every >= 1: they are {m.window} and {m.window_every}")


def _experts(job: Job, dealt: bool, out: list[str]) -> None:
    e, p = job.model.experts, job.parallel
    if e is None:
        out.append(f"ep > 1 needs a model with experts: ep is {p.ep}")
        return
    if min(e.experts, e.top_k, e.ffn, e.every) < 1 or e.dense_layers < 0 or e.imbalance < 1 or e.capacity < 0:
        out.append(
            "experts, top_k, ffn and every >= 1, imbalance >= 1, dense_layers and capacity >= 0: one of them is not"
        )
        return
    if e.top_k > e.experts:
        out.append(f"top_k <= experts: {e.top_k} is more than {e.experts}")
    if e.experts % p.ep:
        out.append(f"experts = ep x n: {e.experts} is no multiple of {p.ep}; ep may be {_divisors(e.experts, p.ep)}")
    if e.ffn % p.expert_tp:
        out.append(f"width of an expert = expert_tp x n: {e.ffn} is no multiple of {p.expert_tp}")
    have, need = job.gpus // p.pp, p.ep * p.expert_tp
    if dealt and have % need:
        out.append(
            f"dp x cp x tp = ep x expert_tp x n: {job.dp} x {p.cp} x {p.tp} = {have} is no multiple of "
            f"{p.ep} x {p.expert_tp} = {need}"
        )


def _sharding(job: Job, dealt: bool, out: list[str]) -> None:
    p, holders = job.parallel, job.dp * job.parallel.cp
    if p.zero not in (0, 1, 2, 3):
        out.append(f"zero is 0, 1, 2 or 3: it is {p.zero}")
    if p.fsdp and p.zero < 2:
        out.append(f"fsdp shards gradients and parameters, so zero is 2 or 3: it is {p.zero}")
    if p.shard < 0:
        out.append(f"shard >= 0: it is {p.shard}")
    elif p.shard and dealt and holders % p.shard:
        out.append(f"dp x cp = shard x n: {job.dp} x {p.cp} = {holders} is no multiple of {p.shard}")


def _numbers(job: Job, out: list[str]) -> None:
    """Precision, recomputation, optimizer."""
    r, gpu = job.recompute, job.platform.gpu
    if job.precision not in PRECISIONS:
        out.append(f"precision is {job.precision!r}: there is {', '.join(PRECISIONS)}")
    elif not supported(job.precision, gpu.peak, gpu.architecture):
        needs = SINCE.get(job.precision, "")
        have = ", ".join(p for p in PRECISIONS if supported(p, gpu.peak, gpu.architecture))
        out.append(f"{gpu.name} has no {job.precision}{f' ({needs} has)' if needs else ''}: it has {have}")
    if r.mode not in MODES:
        out.append(f"recompute is {r.mode!r}: there is {', '.join(MODES)}")
    for name, value in (("share", r.share), ("offload", r.offload)):
        if not 0 <= value <= 1:
            out.append(f"recompute {name} lies between 0 and 1: it is {value:g}")
    for name in r.modules:
        if name not in MODULES:
            out.append(f"recompute knows no module {name!r}: there is {', '.join(MODULES)}")
    if job.optimizer not in OPTIMIZERS:
        out.append(f"optimizer is {job.optimizer!r}: there is {', '.join(OPTIMIZERS)}")


def supported(precision: str, peak: dict[str, float], architecture: str) -> bool:
    """Whether a GPU with such peaks has it."""
    if precision == "fp32":
        return True
    if precision == "mxfp8":
        return "fp8" in peak and architecture in MICROSCALING
    if precision == "nvfp4":
        return "fp4" in peak or architecture == "Blackwell"
    return NEEDED[precision] in peak


def _near(value: int, unit: int) -> str:
    """The multiples on both sides of a value."""
    low = value // unit * unit
    return f"try {low} or {low + unit}" if low else f"try {unit}"


def _divisors(value: int, near: int) -> str:
    """Those of a value on both sides of a degree that is none."""
    all_of = [d for d in range(1, value + 1) if value % d == 0]
    low, high = max(d for d in all_of if d <= near), [d for d in all_of if d > near]
    return f"{low} or {high[0]}" if high else str(low)
