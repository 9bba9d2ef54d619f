"""Host time of a job's layers: as its framework launches them, with adapters' kernels, mixed where layers differ."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from presage.configs.job import Job
from presage.configs.tuning import FEEDING, MIXING, block_adapters
from presage.costs.host_model import HostModel, host_model
from presage.costs.layer_host import ExpertHost, LayerHost, host_facts, layer_host
from presage.errors import PresageError
from presage.hardware.architecture import architecture
from presage.prediction.host_choice import chosen_host
from presage.prediction.jobs.attention_blocks import softmax_fused
from presage.prediction.jobs.efficiency import Efficiency

US = 1e-6
OWN_ERA = "h100"  # whose hosts take as long as the reference
HALF = 0.5  # of a layer's launches, those of its mixer, and those of its feed-forward block
# Launches of an adapter: PEFT casts, drops out, multiplies twice, scales, adds and casts back; fused ones multiply.
PEFT, FUSED = (7, 12), (3, 6)


def layer_host_of(job: Job, efficiency: Efficiency) -> LayerHost:
    """Host time of the job's layers, of a usual one where they differ."""
    host = _framework_host(job, _expert_host(job, efficiency))
    if job.model.pattern:
        host = _mean_layer(job, _framework_host(job, None), host)
    if job.tuning.frozen and job.framework.host != "graph":
        host = _with_adapters(job, host)
    f = job.framework
    if not f.forward_us:
        return host
    return replace(host, forward=f.forward_us * US, backward=f.backward_us * US, recompute=f.forward_us * US)


def _framework_host(job: Job, experts: ExpertHost | None) -> LayerHost:
    era = architecture(job.platform.gpu.architecture).host_era
    f, p = job.framework, job.parallel
    fused = f.attention not in ("unfused", "fused-softmax")
    sizes = p.tp, p.sequence_parallel, experts, fused, softmax_fused(job), f.graphs
    return layer_host(f.host, era, *sizes) if not job.host else _on_host(layer_host(f.host, OWN_ERA, *sizes), job.host)


def _mean_layer(job: Job, dense: LayerHost, routed: LayerHost) -> LayerHost:
    """The mean over layers of a pattern: a mixer is half of a dense layer, experts are what a layer has beside it."""
    m, total = job.model, dict.fromkeys(("forward", "backward", "recompute", "optimizer_layer"), 0.0)
    for layer in range(m.layers):
        for name in total:
            half = HALF * getattr(dense, name)
            total[name] += half if m.mixer(layer) else 0.0
            feeds = {"": 0.0, "dense": half, "experts": getattr(routed, name) - half}
            total[name] += feeds[m.feeds(layer)]
    return replace(routed, **{name: value / m.layers for name, value in total.items()})


def _with_adapters(job: Job, host: LayerHost) -> LayerHost:
    """Adapters' launches; the optimizer has their parameters alone."""
    count = sum(len(block_adapters(job.tuning, job.model, b)) for b in (*MIXING, *FEEDING))
    t, (ahead, back) = host_facts().terms, FUSED if job.framework.fused_adapters else PEFT
    pace = host.collective / (t.collective * US)
    more, less = count * ahead * t.kernel_forward * US * pace, count * back * t.kernel_backward * US * pace
    each = 2 * count * t.parameter_step * US * pace
    return replace(
        host,
        forward=host.forward + more,
        backward=host.backward + less,
        recompute=host.recompute + more,
        optimizer_layer=each,
    )


def _expert_host(job: Job, efficiency: Efficiency) -> ExpertHost | None:
    e = job.model.experts
    if e is None:
        return None
    local = max(1, e.experts // job.parallel.ep)
    return ExpertHost(job.dispatcher, local, job.hides_dispatch, efficiency.experts)


def _on_host(h: LayerHost, name: str) -> LayerHost:
    """The layers' host time on a host that was given, instead of one of the GPU's time."""
    f = job_host(name).factors
    times = {part: getattr(h, part) * (f.autograd if "backward" in part else f.main) for part in LayerHost.__slots__}
    return LayerHost(**times)


@cache
def job_host(name: str) -> HostModel:
    """The host of a job, by its name or file."""
    usual = host_model()
    found = chosen_host(name, usual)
    if found.us is not usual.us:
        raise PresageError(
            f"{name} is a fitted host model, which has no pace for a job's layers: give the file of a host or overheads"
        )
    return found
