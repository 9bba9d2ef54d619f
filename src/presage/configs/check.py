"""Is a Job possible? Every equation between its degrees, said with its numbers when it does not hold."""

from __future__ import annotations

from presage.configs.job import PRECISIONS, Job
from presage.configs.limits import batch_limits, model_limits
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
    out = [*model_limits(job.model), *batch_limits(job), *job.parallel.out_of_range(job.gpus)]
    if out:  # no arithmetic with nonsense
        return out
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
    if job.optimizer not in OPTIMIZERS:
        out.append(f"optimizer is {job.optimizer!r}: choose from {', '.join(OPTIMIZERS)}")


def supported(precision: str, peak: dict[str, float], architecture: str) -> bool:
    """Whether a GPU with such peaks has it."""
    if precision == "fp32":
        return True
    if precision == "mxfp8":
        return "fp8" in peak and architecture in MICROSCALING
    if precision == "nvfp4":
        return "fp4" in peak or architecture == "Blackwell"
    return NEEDED[precision] in peak
