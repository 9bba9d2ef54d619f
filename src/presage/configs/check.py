"""Validation of a Job: every equation between its degrees, with the numbers when one does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from presage.configs.job import PRECISIONS, Job
from presage.configs.recipes import recipe_problems
from presage.configs.transformer import Experts, Transformer
from presage.configs.tuning import tuning_problems
from presage.errors import PresageError
from presage.hardware.architecture import architecture
from presage.parallel.dispatchers import dispatchers

MODES = ("none", "selective", "full")
MODULES = ("core_attn", "mamba", "norm", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "op")
OPTIMIZERS = ("adam", "adamw", "adam-16bit", "sgd", "momentum", "lion", "muon", "adagrad", "none")
NEEDED = {"tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
SINCE = {"mxfp8": "Blackwell or CDNA 4", "nvfp4": "Blackwell"}  # where a peak alone does not tell


def check(job: Job) -> None:
    """Raises with the first equation that does not hold, the others after it."""
    wrong = problems(job)
    if wrong:
        more = f" (and {'; '.join(wrong[1:])})" if len(wrong) > 1 else ""
        raise PresageError(wrong[0] + more)


def problems(job: Job) -> list[str]:
    """All that is wrong with a job, in words; empty for one that can be run. Never raises."""
    out = [*model_limits(job.model), *batch_limits(job)]
    if out:  # no arithmetic with nonsense
        return out + job.parallel.out_of_range(job.gpus)
    out = job.parallel.problems(job.split_sizes)
    _model(job, out)
    _numbers(job, out)
    return out


def _model(job: Job, out: list[str]) -> None:
    """The model by itself, and the platform's size."""
    m, e, reach = job.model, job.model.experts, job.platform.links[-1].ranks
    if job.gpus > reach:
        out.append(f"gpus <= those of the platform: {job.gpus} is more than the {reach} of {job.platform.key}")
    if m.latent is None and m.heads % m.kv_heads:
        out.append(f"heads = kv_heads x n: {m.heads} is no multiple of {m.kv_heads}")
    if m.positions == "learned" and 0 < m.max_positions < job.sequence:
        out.append(f"sequence <= max_positions: {job.sequence} is more than {m.max_positions} learned positions")
    if e and e.top_k > e.experts:
        out.append(f"top_k <= experts: {e.top_k} is more than {e.experts}")
    if e:
        out += _routing(e, job.dispatcher)


def _routing(e: Experts, name: str) -> Iterator[str]:
    """Groups of experts, and what a dispatcher cannot do."""
    if e.group_top_k and not e.groups:
        yield f"group_top_k needs groups: group_top_k is {e.group_top_k}, groups is 0"
    elif e.groups and (e.experts % e.groups or e.group_top_k > e.groups):
        yield f"experts = groups x n, group_top_k <= groups: {e.experts}, {e.groups} and {e.group_top_k} are not"
    if e.capacity and name in dispatchers() and dispatchers()[name].fused:
        yield f"{name} pads and drops no tokens: with a capacity use dispatcher alltoall or allgather"


def _numbers(job: Job, out: list[str]) -> None:
    """Precision, recomputation, optimizer."""
    r, gpu = job.recompute, job.platform.gpu
    if job.precision not in PRECISIONS:
        out.append(f"precision is {job.precision!r}: choose from {', '.join(PRECISIONS)}")
    elif not supported(job.precision, gpu.peak, gpu.architecture):
        needs = SINCE.get(job.precision, "")
        have = ", ".join(p for p in PRECISIONS if supported(p, gpu.peak, gpu.architecture))
        out.append(f"{gpu.name} has no {job.precision}{f' ({needs} has)' if needs else ''}: it has {have}")
    if r.mode not in MODES:
        out.append(f"recompute is {r.mode!r}: choose from {', '.join(MODES)}")
    for name, value in (("share", r.share), ("offload", r.offload)):
        if not 0 <= value <= 1:
            out.append(f"recompute {name} lies between 0 and 1: it is {value:g}")
    for name in r.modules:
        if name not in MODULES:
            out.append(f"recompute knows no module {name!r}: choose from {', '.join(MODULES)}")
    out += tuning_problems(job.tuning, job.model)
    out += recipe_problems(job.recipe, job.precision, job.optimizer)
    if job.optimizer not in OPTIMIZERS:
        out.append(f"optimizer is {job.optimizer!r}: choose from {', '.join(OPTIMIZERS)}")


def supported(precision: str, peak: dict[str, float], built: str) -> bool:
    """Whether a GPU with such peaks, of the architecture `built`, has it."""
    if precision == "fp32":
        return True
    if precision == "mxfp8":
        return "fp8" in peak and architecture(built).mxfp8
    if precision == "nvfp4":
        return "fp4" in peak or architecture(built).nvfp4
    return NEEDED[precision] in peak


# ---- Plausible sizes: beyond them a figure is a typo; ten times the largest systems fit

# The least and the most of each, by its name in a job file.
MODEL = {
    "hidden": (1, 1_000_000), "layers": (1, 10_000), "heads": (1, 100_000), "vocab": (1, 100_000_000),
    "ffn": (0, 10_000_000), "kv_heads": (1, 100_000), "head_dim": (1, 100_000), "max_positions": (0, 10**9),
    "window": (0, 10**9), "window_every": (1, 10_000), "predicted": (0, 100),
}  # fmt: skip
EXPERTS = {
    "experts": (1, 100_000), "top_k": (1, 100_000), "ffn": (1, 10_000_000), "shared_ffn": (0, 10_000_000),
    "dense_layers": (0, 10_000), "every": (1, 10_000), "capacity": (0.0, 1000.0), "imbalance": (1.0, 10_000.0),
    "groups": (0, 100_000), "group_top_k": (0, 100_000), "latent": (0, 1_000_000),
}  # fmt: skip
LATENT = {
    "query_rank": (0, 1_000_000), "key_rank": (1, 1_000_000), "rope": (0, 100_000), "nope": (0, 100_000),
    "value": (1, 100_000),
}  # fmt: skip
TRAINING = {"sequence": 10**8, "micro_batch": 10**6, "global_batch": 10**9}


@lru_cache(256)
def model_limits(model: Transformer) -> tuple[str, ...]:
    """What of a model cannot be, in words."""
    out = [*_out_of_range(model, MODEL, "")]
    if model.experts:
        out += _out_of_range(model.experts, EXPERTS, "experts.")
    if model.latent:
        out += _out_of_range(model.latent, LATENT, "latent.")
        if model.latent.rope + model.latent.nope < 1:
            out.append("latent.rope + latent.nope >= 1: a head has no width")
    if model.ffn < 1 and not _all_experts(model):
        out.append(f"ffn >= 1: it is {model.ffn}")
    return tuple(out)


def batch_limits(job: Job) -> list[str]:
    """Sizes of a job's samples that cannot be, in words."""
    sizes = (job.sequence, job.micro_batch, job.global_batch)
    if min(sizes) >= 1 and max(sizes) <= TRAINING["micro_batch"]:
        return []  # nearly all of the many that a search asks about
    pairs = zip(TRAINING.items(), sizes, strict=True)
    return [_range(name, value, 1, most) for (name, most), value in pairs if not 1 <= value <= most]


def _out_of_range(part: object, limits: Mapping[str, tuple[float, float]], prefix: str) -> list[str]:
    values = {name: getattr(part, name) for name in limits}
    return [
        _range(prefix + name, value, *limits[name])
        for name, value in values.items()
        if not limits[name][0] <= value <= limits[name][1]
    ]


def _range(name: str, value: float, least: float, most: float) -> str:
    if value < least:
        return f"{name} >= {least:g}: it is {value}"
    return f"{name} <= {most:,.0f}: it is {value}"


def _all_experts(m: Transformer) -> bool:
    """No layer has a feed-forward block of its own."""
    return m.experts is not None and m.experts.dense_layers == 0 and m.experts.every == 1


# ---- Notes on a valid job.


def job_notes(job: Job) -> tuple[str, ...]:
    """What the owner of a job that passes `check` should know: what is legal, but unusual."""
    return (*_tensor_notes(job), *_pipeline_notes(job), *_expert_notes(job), *_other_notes(job))


def _tensor_notes(job: Job) -> list[str]:
    p, m, domain, out = job.parallel, job.model, job.platform.domain, []
    if p.tp > domain:
        out.append(f"tp = {p.tp} reaches beyond the {domain} GPUs of a node: its collectives go over the network")
    if m.latent is None and p.tp > m.kv_heads:
        out.append(f"tp = {p.tp} is more than kv_heads = {m.kv_heads}: each key head is on {p.tp // m.kv_heads} ranks")
    if p.tp > 1 and not p.sequence_parallel:
        out.append("tp without sequence_parallel: every rank keeps all of the activations between its blocks")
    return out


def _pipeline_notes(job: Job) -> list[str]:
    p, out = job.parallel, []
    if p.pp == 1:
        return []
    counts = p.slot_layers(job.model.layers, job.model.predicted)
    inner = counts[1:-1] if p.ends_as_layers else counts
    if not p.layers_as and len(set(inner)) > 1:
        out.append(f"{job.model.layers} layers over {len(counts)} chunks: {min(counts)} to {max(counts)} layers each")
    if job.microbatches < p.pp:
        out.append(f"{job.microbatches} microbatches over pp = {p.pp} stages: the pipeline is never full")
    return out


def _expert_notes(job: Job) -> list[str]:
    p, e, domain, out = job.parallel, job.model.experts, job.platform.domain, []
    if e is None:
        return []
    if p.ep * p.expert_tp > domain:
        sizes = f"ep x expert_tp = {p.ep} x {p.expert_tp}"
        out.append(f"{sizes} reaches beyond the {domain} GPUs of a node: tokens cross the network to their experts")
    if e.imbalance == 1 and not e.capacity and not e.loads:
        out.append("experts are as busy as each other (imbalance = 1): real routing is slower")
    if e.loads and e.capacity and e.dropped:
        out.append(f"{e.dropped:.1%} of tokens' choices are beyond the capacity of their expert, and dropped")
    return out


def _other_notes(job: Job) -> list[str]:
    p, m, domain, out = job.parallel, job.model, job.platform.domain, []
    if job.gpus > domain and job.gpus % domain:
        out.append(f"{job.gpus} GPUs are no whole number of nodes of {domain}")
    if p.shard and not p.zero:
        out.append(f"shard = {p.shard} does nothing with zero = 0")
    if m.window and m.window >= job.sequence:
        out.append(f"window = {m.window} does nothing on sequences of {job.sequence}")
    return out
