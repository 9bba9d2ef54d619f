"""Laws of a step, on jobs drawn at random: more to do never takes less time, what is sent is paid for, parts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from presage.configs.check import problems
from presage.configs.frameworks import Overlap, framework, frameworks
from presage.configs.job import Job, Recompute
from presage.configs.transformer import Experts, Latent, Transformer
from presage.hardware import Platform, cluster
from presage.parallel.plan import Axis, ParallelPlan
from presage.parallel.schedules import SCHEDULES
from presage.prediction.jobs.block_cost import BlockCostModel, overlap_loss
from presage.prediction.jobs.efficiency import LAWS, Efficiency
from presage.prediction.jobs.job_step import JobStep, StepInputs, job_step, step_at_clock
from presage.prediction.jobs.plan_bounds import plan_lower_bounds
from presage.prediction.jobs.plan_cache import clear_plan_cache

DENSE = Transformer(2048, 8, 16, 32000, 8192, 8, 128)
MODELS = (
    DENSE,
    replace(DENSE, activation="gelu", norm="layernorm", bias=True, tied=True, kv_heads=16, window=1024),
    replace(DENSE, experts=Experts(16, 2, 1024, shared_ffn=1024, dense_layers=1)),
    replace(DENSE, kv_heads=16, latent=Latent(768, 512, 64, 128, 128), experts=Experts(16, 4, 512), predicted=1),
)
GPUS = ("v100_32gb", "a100_80gb", "h100_sxm", "b200", "mi300x")
TRANSFERS = ("tp", "cp", "ep", "dp", "sharding")
ALL, NONE = Overlap(*[True] * 6), Overlap(*[False] * 6)
STEPS = 0.02  # of a product: a larger one may be so much quicker, where it is cut up otherwise


@st.composite
def jobs(draw: Any, models: tuple[Transformer, ...] = MODELS, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> Job:
    """Any that is possible, on up to 128 GPUs."""
    gpu, software = draw(st.sampled_from(GPUS)), draw(st.sampled_from(frameworks()))
    place = cluster(gpu, 8, draw(st.sampled_from((100.0, 400.0, 3200.0))))
    tp, pp, cp, dp = (draw(st.sampled_from(s)) for s in ((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4)))
    model = draw(st.sampled_from(models))
    schedule = draw(st.sampled_from(schedules)) if pp > 1 else "1f1b"
    zero, fsdp = draw(st.sampled_from(((0, False), (1, False), (2, False), (3, False), (3, True), (2, True))))
    parallel = ParallelPlan(
        tp=tp, sequence_parallel=tp > 1 and draw(st.booleans()), pp=pp, virtual=2 if schedule == "interleaved" else 1,
        schedule=schedule, cp=cp, ep=draw(st.sampled_from((1, 2, 4))) if model.experts else 1, zero=zero, fsdp=fsdp,
    )  # fmt: skip
    micro, count = draw(st.sampled_from((1, 2))), pp * draw(st.integers(1, 6))
    made = Job(
        model, place, tp * pp * cp * dp, draw(st.sampled_from((1024, 4096))), micro, micro * dp * count, parallel,
        precision=draw(st.sampled_from(("bf16", "fp16", "fp8", "fp32"))),
        recompute=Recompute(draw(st.sampled_from(("none", "selective", "full")))),
        overlap=draw(st.builds(Overlap, *[st.booleans()] * 6)), framework=framework(software, place.gpu),
    )  # fmt: skip
    assume(not problems(made))
    return made


def times(job: Job, **changes: Any) -> tuple[float, float]:
    """Seconds of a step, and of the job changed."""
    return job_step(job).seconds, job_step(replace(job, **changes)).seconds


def full_clock(s: JobStep) -> float:
    """Seconds of compute as the clock would have them without a power limit."""
    return (s.parts["products"] + s.parts["attention"]) / s.slowdown + s.parts["streams"]


# ---- sums


def step_lower_bound(job: Job) -> float:
    """Seconds that a job's step is not below."""
    own = (job.parallel,)
    return float(plan_lower_bounds(job, (job.micro_batch,), own, own, (job.recompute,), None).item())


@given(jobs())
def test_parts_add_up_and_are_there(job: Job) -> None:
    s = job_step(job)
    assert sum(s.parts.values()) == pytest.approx(s.seconds, rel=1e-9)
    assert min(s.parts.values()) > -1e-9 * s.seconds
    assert s.slowdown >= 1.0 and np.isfinite(s.seconds)
    assert s.forward.shape == s.backward.shape == (job.parallel.pp, job.parallel.virtual)
    assert (s.pipeline.busy <= s.pipeline.total * (1 + 1e-9)).all()
    assert step_lower_bound(job) <= s.seconds * (1 + 1e-9)


PLANS: tuple[dict[str, Any], ...] = (
    {}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"ep": 4}, {"ep": 2}, {"ep": 2, "expert_tp": 2},
    {"pp": 2},
    {"pp": 2, "virtual": 2, "schedule": "interleaved"}, {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 2, "schedule": "gpipe"}, {"pp": 2, "layers_as": (3, 5)}, {"pp": 2, "ends_as_layers": True}, {"zero": 1},
    {"zero": 2}, {"zero": 3}, {"zero": 3, "fsdp": True}, {"zero": 3, "fsdp": True, "shard": 4},
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("turned", [False, True])
def test_what_plans_share_changes_no_time(model: Transformer, turned: bool) -> None:
    """Prices of one plan are kept for others: whatever came before, a step takes what it takes alone."""
    plans = [replace(node(model), parallel=ParallelPlan(**p)) for p in PLANS if model.experts or "ep" not in p]
    plans += [replace(plans[0], micro_batch=2), replace(plans[0], global_batch=32), replace(plans[0], gpus=16)]
    plans += [replace(plans[0], recompute=Recompute(*r)) for r in (("full",), ("full", (), 0.5), ("selective",))]
    plans += [replace(plans[0], optimizer="sgd"), replace(plans[0], overlap=NONE), replace(plans[0], precision="fp8")]
    plans = plans[::-1] if turned else plans
    clear_plan_cache()
    shared = [job_step(j).parts for j in plans]
    for plan, parts in zip(plans, shared, strict=True):
        clear_plan_cache()
        assert job_step(plan).parts == parts


def node(model: Transformer = DENSE, network: float = 400.0) -> Job:
    """A job on eight GPUs."""
    place = cluster("h100_sxm", 8, network)
    return Job(model, place, 8, 2048, 1, 16, overlap=ALL, framework=framework("megatron-core", place.gpu))


# ---- more to do


@given(jobs())
def test_more_microbatches_take_longer(job: Job) -> None:
    before, after = times(job, global_batch=2 * job.global_batch)
    assert after > before
    assert after < 2.05 * before * job_step(replace(job, global_batch=2 * job.global_batch)).slowdown


@given(jobs())
def test_more_layers_take_longer(job: Job) -> None:
    """Beside a longer pass gradients may be cut into one bucket more and be sent sooner; all else takes longer."""
    slots = job.parallel.pp * job.parallel.virtual
    more = replace(job.model, layers=job.model.layers + slots)
    before, after = job_step(job), job_step(replace(job, model=more))
    assert after.seconds - after.parts["dp"] > before.seconds - before.parts["dp"]
    apart, longer = times(replace(job, overlap=NONE), model=more)
    assert longer > apart


@given(jobs())
def test_longer_sequences_take_longer(job: Job) -> None:
    before, after = times(job, sequence=2 * job.sequence)
    assert after > before * (1 - STEPS)


@given(jobs(), st.sampled_from(("selective", "full")))
def test_recomputation_takes_longer_where_the_gpu_sets_the_pace(job: Job, mode: str) -> None:
    job = replace(job, framework=replace(job.framework, host="graph"))
    before, after = (job_step(replace(job, recompute=Recompute(m))) for m in ("none", mode))
    assert after.seconds > before.seconds * (1 - 1e-9)
    assert full_clock(after) > full_clock(before)


@given(jobs(schedules=("1f1b", "interleaved", "gpipe")), st.floats(1.01, 1.5))
def test_slower_products_never_shorten_a_step(job: Job, factor: float) -> None:
    """At any one clock; and a higher clock gives back no more than it is higher: the power limit's clock is found as if
    slower products always lengthened the step, and where the host hides them other kernels gain a little by that.
    Zero bubble is left out: where the host sets the pace, slower products are more of a pass to be put off."""
    usual = job_step(job, LAWS)
    for slower in (Efficiency(factor, 1.0), Efficiency(1.0, factor)):
        found = job_step(job, slower)
        assert found.seconds * max(1.0, usual.slowdown / found.slowdown) >= usual.seconds * (1 - 1e-9)
        for clock in (1.0, usual.slowdown):
            before, after = (
                step_at_clock(StepInputs.of(job, BlockCostModel(job, e)), clock).seconds for e in (LAWS, slower)
            )
            assert after >= before * (1 - 1e-9)


# ---- spread otherwise


@given(jobs())
def test_more_tensor_parallelism_never_adds_compute(job: Job) -> None:
    p = job.parallel
    assume(p.pp == 1)  # parts are those of the busiest stage, which may be another
    wider = replace(job, gpus=2 * job.gpus, parallel=replace(p, tp=2 * p.tp))
    assume(not problems(wider))
    assert full_clock(job_step(wider)) <= full_clock(job_step(job)) * (1 + STEPS)


def slower(platform: Platform, times: float) -> Platform:
    """The same machines with links of less bandwidth and more latency."""
    links = (replace(k, bandwidth=k.bandwidth / times, latency=k.latency * times) for k in platform.links)
    return replace(platform, links=tuple(links))


@given(jobs(), st.sampled_from((1.5, 4.0)))
def test_a_slower_network_never_shortens_a_step(job: Job, times: float) -> None:
    before, after = job_step(job), job_step(replace(job, platform=slower(job.platform, times)))
    assert after.seconds >= before.seconds * (1 - 1e-9)
    bare = replace(job, overlap=NONE, framework=replace(job.framework, host="graph", async_backward=False))
    if job.gpus > 1 and not job_step(bare).parts["host"]:
        assert job_step(replace(bare, platform=slower(job.platform, times))).seconds > job_step(bare).seconds


@given(jobs())
def test_overlap_costs_at_most_what_transfers_hold(job: Job) -> None:
    """Beside a transfer compute has fewer multiprocessors, and a warmer GPU; else nothing is lost. An overlapped
    exchange of experts costs the host time, too."""
    assume(job.model.experts is None)
    apart, beside = job_step(replace(job, overlap=NONE)), job_step(replace(job, overlap=ALL))
    most = (1 + overlap_loss(job.platform.gpu)) * beside.slowdown / apart.slowdown
    assert beside.seconds <= apart.seconds * most * (1 + 1e-9)


@given(jobs(schedules=("1f1b",)))
def test_zero_bubble_is_no_slower_where_stages_are_equal(job: Job) -> None:
    p = job.parallel
    assume(p.pp > 1 and not job.model.predicted)
    small = replace(job.model, vocab=64, experts=None)  # so that embedding and head are next to nothing
    one, other = (replace(job, model=small, parallel=replace(p, schedule=s)) for s in ("1f1b", "zero-bubble"))
    before, after = job_step(one), job_step(other)
    assert after.seconds <= before.seconds * max(1.0, after.slowdown / before.slowdown) * (1 + 1e-3)


@given(jobs())
def test_sharded_weights_are_sent(job: Job) -> None:
    holders = max(job.dp * job.parallel.cp, job.expert_dp if job.model.experts else 1)
    s = job_step(replace(job, overlap=NONE))
    by_pass = job.parallel.zero >= 2 or job.parallel.fsdp
    assert (s.parts["sharding"] > 0) == (by_pass and holders > 1)
    if not by_pass and holders > 1:
        assert s.parts["dp"] > 0


@pytest.mark.parametrize(("zero", "fsdp", "gathers"), [(3, True, 2), (3, False, 2), (2, True, 1)])
def test_on_a_slow_network_a_step_is_what_sharding_sends(zero: int, fsdp: bool, gathers: int) -> None:
    """Parameters are gathered in each pass (ZeRO-3), or only forward, and gradients reduced, for every microbatch."""
    job = replace(node(network=0.1), gpus=64, global_batch=256, parallel=ParallelPlan(zero=zero, fsdp=fsdp))
    price = BlockCostModel(job, LAWS)
    layer = job.model.parameters / job.model.layers
    gather = price.collective_seconds("all_gather", layer * job.framework.gather_bytes, Axis.SHARD)
    reduce = price.collective_seconds("reduce_scatter", layer * job.framework.reduce_bytes, Axis.SHARD)
    sent = job.microbatches * job.model.layers * (gathers * gather + reduce)
    # of each, one layer's is still on its way when the pass is over; and compute is next to nothing
    assert job_step(job, LAWS).seconds == pytest.approx(sent * (1 + 1 / job.model.layers), rel=0.06)


def test_weights_that_both_ends_use_are_reduced_between_them() -> None:
    tied = replace(DENSE, tied=True)
    split = replace(node(tied), gpus=8, parallel=ParallelPlan(tp=4, pp=2), overlap=NONE)
    nbytes = tied.vocab * tied.hidden / 4 * split.framework.reduce_bytes
    assert (
        job_step(split).parts["dp"] == BlockCostModel(split, LAWS).collective_seconds("all_reduce", nbytes, Axis.PP) > 0
    )
    assert job_step(replace(split, model=DENSE)).parts["dp"] == 0
    assert job_step(replace(split, parallel=ParallelPlan(tp=8))).parts["dp"] == 0


@pytest.mark.parametrize("sequence", [False, True])
def test_stages_send_a_part_from_each_rank_and_gather_it_where_it_is_not_split(sequence: bool) -> None:
    job = replace(node(), parallel=ParallelPlan(tp=4, pp=2, sequence_parallel=sequence))
    price = BlockCostModel(job, LAWS)
    whole = job.rank_tokens * job.model.hidden * 2
    gather = 0.0 if sequence else price.collective_seconds("all_gather", whole, Axis.TP)
    assert StepInputs.of(job, price).send == price.collective_seconds("send_recv", whole / 4, Axis.PP) + gather


@given(jobs())
def test_one_gpu_talks_to_nobody(job: Job) -> None:
    batch = job.micro_batch * job.microbatches
    alone = replace(
        job, gpus=1, parallel=ParallelPlan(zero=job.parallel.zero, fsdp=job.parallel.fsdp), global_batch=batch
    )
    s = job_step(alone)
    assert [s.parts[name] for name in TRANSFERS] == [0.0] * len(TRANSFERS)
    assert s.parts["bubble"] == pytest.approx(0.0, abs=1e-9 * s.seconds)


@given(jobs())
def test_twice_the_replicas_with_twice_the_batch_take_as_long_and_a_little_longer(job: Job) -> None:
    """From a node for each stage on: within one, switches that add and meshes make more GPUs quicker."""
    more = max(1, 8 * job.parallel.pp // job.gpus)
    job = replace(job, gpus=more * job.gpus, global_batch=more * job.global_batch)
    job = replace(job, parallel=replace(job.parallel, zero=0, fsdp=False))
    before, after = job_step(job), job_step(replace(job, gpus=2 * job.gpus, global_batch=2 * job.global_batch))
    assert after.seconds >= before.seconds * (1 - 1e-9)
    compute = after.seconds - after.parts["dp"]
    assert compute * before.slowdown / after.slowdown >= (before.seconds - before.parts["dp"]) * (1 - 0.02)
    assert compute <= (before.seconds - before.parts["dp"]) * (1 + 0.02)
