"""Layouts: the space has all legal plans and no other, and the search finds the best of them for certain."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from presage.configs.check import problems
from presage.configs.frameworks import framework
from presage.configs.job import Job, Recompute
from presage.configs.models import preset
from presage.configs.transformer import Experts, Transformer
from presage.errors import PresageError
from presage.hardware import platform
from presage.memory import job_memory
from presage.memory.job_memory import most_needed, plans_needed
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.plan_bounds import plan_lower_bounds
from presage.search import (
    JobPlan,
    PlanSpace,
    SearchResult,
    apply_plan,
    job_plan,
    parse_keep,
    plan_words,
    search,
)
from presage.search.plan_space import divisors
from presage.search.plans import RECOMPUTES, knob
from presage.search.search_result import compare_plans, predict_plan

DENSE = Transformer(2048, 12, 16, 32000, 8192, 4, 128)
SPARSE = Transformer(2048, 6, 16, 32000, 4096, 8, 128, experts=Experts(4, 2, 1024, 1024, 1))
NODE = "dgx-h100"


def job(model: Transformer, gpus: int = 16, batch: int = 16, sequence: int = 4096, where: str = NODE) -> Job:
    place = platform(where)
    software = framework("megatron-core", place.gpu)
    return Job(model, place, gpus, sequence, 1, batch, overlap=software.overlap, framework=software)


def small(model: str = "llama3.1-8b", gpus: int = 16) -> Job:
    return job(preset(model), gpus, 32, 8192)


def layouts(base: Job, gpus: int, keep: list[str] = []) -> list[JobPlan]:  # noqa: B006
    space = PlanSpace(base, (gpus,), parse_keep(keep))
    return [x for f in space.families() for x in space.layouts(f)]


def some(count: int, seed: int = 0) -> list[Job]:
    """Plans of all kinds of a dense model and one with experts, on two kinds of machines."""
    rng = random.Random(seed)
    bases = [
        (small(), 64),
        (job(preset("deepseek-v3"), 512, 512), 512),
        (job(preset("gpt3-175b"), where="dgx-a100"), 64),
    ]
    found = []
    for base, gpus in bases:
        base = replace(base, global_batch=512, sequence=2048)
        found += [apply_plan(base, x) for x in rng.sample(layouts(base, gpus), count)]
    return found


# ---- the space


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [
        (DENSE, 12, 12),
        (SPARSE, 8, 8),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((DENSE, 16, 4), (SPARSE, 12, 12), (SPARSE, 16, 4))),
    ],
)
def test_the_space_has_every_legal_plan_once(model: Transformer, gpus: int, batch: int) -> None:
    base = job(model, gpus, batch)
    made = layouts(base, gpus)
    assert len(made) == len(set(made))
    assert not [x for x in made if problems(apply_plan(base, x))]
    sent = {x.with_parallel(dispatcher="") for x in made}  # the quickest for each, not every one
    assert sent == {x for x in brute(base, gpus) if not problems(apply_plan(base, x))} and len(sent) == len(made)


def test_the_dispatcher_with_the_shortest_exchanges_is_taken() -> None:
    wide = job(preset("deepseek-v3"), 512, 512)
    found = {x.parallel.dispatcher for x in layouts(wide, 512, ["ep=64", "tp=1", "cp=1", "micro_batch=1", "pp=8"])}
    assert len(found) == 1 and found <= {"deepep", "hybridep"}
    kept = layouts(wide, 512, ["ep=64", "tp=1", "cp=1", "pp=8", "micro_batch=1", "dispatcher=alltoall"])
    assert {x.parallel.dispatcher for x in kept} == {"alltoall"}
    assert {x.parallel.dispatcher for x in layouts(small(), 16)} == {""}


def brute(base: Job, gpus: int) -> list[JobPlan]:
    """All combinations of degrees, schedules, sharding and recomputation, legal or not, that the space may have."""
    degrees = range(1, gpus + 1)
    experts = base.model.experts
    ep = range(1, experts.experts + 1) if experts else [1]
    out = []
    for tp, cp, pp, size in product(degrees, (1, 2, 4), degrees, (1, 2, 4, 8, 16)):
        if gpus % (tp * cp * pp) or tp > 16:
            continue
        sequence, holders, near = tp > 1, gpus // (tp * pp), 8 // tp
        sharding = [(z, False, 0) for z in range(4)] + [(2, True, 0), (3, True, 0), (3, True, near)]
        if holders == 1:
            sharding = sharding[:1]
        elif not 1 < near < holders:
            sharding.pop()
        sharding = [s for s in sharding if pp == 1 or s[0] < 2 or s[1]]  # as in DeepSpeed
        for e, cut in product(ep, {1, tp} if experts else {1}):
            for split, shard, again in product(splits(base, pp), sharding, RECOMPUTES.values()):
                p = ParallelPlan(tp, sequence, pp, *split[:2], cp, e, cut, *shard, ends_as_layers=split[2])
                out.append(JobPlan(gpus, p, size, again))
    return out


def splits(base: Job, pp: int) -> list[tuple[int, str, bool]]:
    """Chunks in powers of two, or as many as come out even; `ends` only where layers alone do not."""
    layers, out = base.model.layers, []
    for v in range(1, layers + 3):
        even = not layers % (pp * v)
        if not (v & (v - 1) == 0 or even or not (layers + 2) % (pp * v)):
            continue
        kinds = ["1f1b"] if pp == v == 1 else ["1f1b", "zero-bubble"] if v == 1 else ["interleaved"]
        ends = [False] if even else [False, True]
        out += [(v, kind, end) for kind in kinds for end in ends]
    return out


def test_divisors() -> None:
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(49) == [1, 7, 49]
    assert len(divisors(65536)) == 17


def test_knobs_can_be_held_fast() -> None:
    kept = layouts(small(), 16, ["tp=4,cp=1", "recompute=full", "recompute=none", "zero=1", "schedule=1f1b"])
    assert {(x.parallel.tp, x.parallel.cp, x.parallel.zero) for x in kept} == {(4, 1, 1)}
    assert {knob(x, "recompute") for x in kept} == {"full", "none"}
    assert {(x.parallel.schedule, x.parallel.virtual) for x in kept} == {("1f1b", 1)}
    every = layouts(small(), 16)
    assert set(kept) == {
        x for x in every
        if (p := x.parallel).tp == 4 and p.cp == 1 and p.zero == 1 and p.schedule == "1f1b"
        and knob(x, "recompute") in ("full", "none")
    }  # fmt: skip


def test_the_jobs_own_choices_are_part_of_the_space() -> None:
    own = replace(small(), micro_batch=1, recompute=Recompute("selective", ("mlp",)))
    assert own.recompute in {x.recompute for x in layouts(own, 16)}
    sharded = replace(own, parallel=replace(own.parallel, zero=2, shard=4))
    assert {(p.zero, p.shard) for x in layouts(sharded, 16) if (p := x.parallel).pp > 1} >= {(2, 4), (1, 0)}
    assert not [x for x in layouts(sharded, 16) if problems(apply_plan(sharded, x))]
    odd = replace(own, global_batch=48, micro_batch=3)
    assert {1, 2, 3} <= {x.micro_batch for x in layouts(odd, 16)}


@pytest.mark.parametrize(
    ("text", "said"),
    [("tp", "tp=8"), ("tp=", "tp=8"), ("micro_bach=1", "did you mean .micro_batch."), ("color=red", "micro_batch")],
)
def test_what_cannot_be_kept_is_told(text: str, said: str) -> None:
    with pytest.raises(PresageError, match=said):
        parse_keep([text])


def test_a_plan_in_words() -> None:
    p = ParallelPlan(tp=8, sequence_parallel=True, cp=2, pp=4, virtual=4, schedule="interleaved", zero=1)
    x = JobPlan(1024, replace(p, ends_as_layers=True), 1, RECOMPUTES["every-2"])
    assert plan_words(x) == "tp8 cp2 pp4 v4 ends dp16 mb1 zero1 every-2"
    sharded = ParallelPlan(ep=8, zero=3, fsdp=True, shard=8)
    flat = JobPlan(64, sharded, 2, Recompute("selective", ("mlp", "moe_act")))
    assert plan_words(flat) == "ep8 dp64 mb2 hsdp8 selective:mlp+moe_act"
    assert job_plan(apply_plan(small(), x)) == x


# ---- prices


def test_what_plans_share_changes_no_price() -> None:
    """Prices that were worked out for other plans, and a step on its own."""
    from presage.prediction.jobs.plan_cache import clear_plan_cache

    for one in some(10):
        shared = job_step(one)
        clear_plan_cache()
        alone = job_step(one)
        assert alone.seconds == pytest.approx(shared.seconds, rel=1e-12)
        assert alone.parts == pytest.approx(shared.parts, rel=1e-9, abs=1e-12)


def step_lower_bound(job: Job) -> float:
    """Seconds that a job's step is not below."""
    own = (job.parallel,)
    return float(plan_lower_bounds(job, (job.micro_batch,), own, own, (job.recompute,), None).item())


def test_no_step_is_below_its_bound() -> None:
    for one in some(30, seed=1):
        assert 0 < step_lower_bound(one) <= job_step(one).seconds * (1 + 1e-12), plan_words(job_plan(one))


def test_the_worst_stage_is_found_without_all_of_them() -> None:
    for one in some(30, seed=2):
        assert most_needed(one) == pytest.approx(job_memory(one).needed, rel=1e-12), plan_words(job_plan(one))


@pytest.mark.parametrize("base", [small(), job(SPARSE, 8, 32)])
def test_families_are_surveyed_as_their_plans_are_one_by_one(base: Job) -> None:
    space, rng = PlanSpace(base, (base.gpus,)), random.Random(4)
    for f in rng.sample(list(space.families()), 12):
        grid, made = space.grid(f), replace(base, gpus=f.gpus, parallel=f.parallel)
        needed, bound = (many(made, f.sizes, *grid[1:4]).ravel() for many in (plans_needed, plan_lower_bounds))
        legal = np.flatnonzero(np.broadcast_to(grid.allowed[:, :, None, None], grid.shape)).tolist()
        assert len(legal) == grid.legal
        for place in rng.sample(legal, 8):
            one = apply_plan(base, grid.plan(place))
            assert not problems(one)
            assert needed[place] == pytest.approx(job_memory(one).needed, rel=1e-12)
            assert bound[place] == pytest.approx(step_lower_bound(one), rel=1e-12)


def test_larger_microbatches_need_no_less_memory() -> None:
    """What a survey takes for granted."""
    for one in some(30, seed=3):
        larger = replace(one, micro_batch=2 * one.micro_batch)
        if not problems(larger):
            assert most_needed(larger) >= most_needed(one) * (1 - 1e-12), plan_words(job_plan(one))


# ---- the search

NARROW = parse_keep(["cp=1", "virtual=1", "virtual=2", "virtual=4"])


@cache
def narrow() -> SearchResult:
    """A search that several tests look at."""
    return search(small(), 16, keep=NARROW)


def same(a: SearchResult, b: SearchResult) -> None:
    assert [(job_plan(p.job), p.seconds) for p in a.best] == [(job_plan(p.job), p.seconds) for p in b.best]
    assert a.front == b.front
    assert a.by_knob == b.by_knob


@pytest.mark.parametrize(
    ("base", "gpus", "objective", "keep"),
    [
        pytest.param(small(), 16, "mean", ["cp=1", "cp=2", "virtual=1", "virtual=2"], marks=pytest.mark.slow),
        (small(), 24, "mean", ["tp=1", "tp=2", "cp=1", "recompute=none", "recompute=full"]),
        (small(), (8, 16), "cost", ["cp=1", "tp=2", "tp=4", "recompute=none"]),
        (job(SPARSE, 8, 32), 8, "mean", ["cp=1", "tp=1", "tp=2", "sharding=zero1", "sharding=fsdp"]),
        (job(SPARSE, 8, 32), 8, "mean", ["tp=1", "tp=2", "pp=1", "pp=2", "recompute=none", "recompute=full"]),
    ],
)
def test_a_pruned_search_finds_what_an_exhaustive_one_does(
    base: Job, gpus: int | tuple[int, ...], objective: str, keep: list[str]
) -> None:
    base, kept = replace(base, global_batch=48 if gpus == 24 else base.global_batch), parse_keep(keep)
    quick = search(base, gpus, objective=objective, keep=kept)
    whole = search(base, gpus, objective=objective, keep=kept, prune=False)
    same(quick, whole)
    assert quick.counts.legal == whole.counts.legal == quick.counts.too_large + quick.counts.fit
    assert whole.counts.priced == whole.counts.fit > quick.counts.priced
    assert quick.counts.set_aside == quick.counts.fit - quick.counts.priced


def test_an_exhaustive_search_prices_every_plan_as_a_step_does() -> None:
    keep = parse_keep(["tp=2", "cp=1", "recompute=none"])
    found = search(small(), 16, keep=keep, prune=False, top=10_000)
    every = [apply_plan(small(), x) for x in layouts(small(), 16, ["tp=2,cp=1,recompute=none"])]
    fit = [one for one in every if job_memory(one).fits]
    assert found.counts.legal == len(every) and found.counts.priced == len(fit)
    expected = sorted(job_step(one).seconds for one in fit)
    assert [p.seconds for p in found.best] == pytest.approx(expected, rel=1e-12)
    assert all(p.memory.fits for p in found.best)


def test_the_front_is_of_plans_that_none_beats_in_both() -> None:
    found = search(small(), 16, keep=parse_keep(["cp=1", "virtual=1"]), prune=False, top=100_000)
    every = [(p.seconds, p.memory.needed) for p in found.best]
    for s in found.front:
        assert not any(t <= s.seconds and m <= s.needed and (t < s.seconds or m < s.needed) for t, m in every)
    edge = [(s.seconds, s.needed) for s in found.front]
    assert edge == sorted(edge) and edge[0][0] == every[0][0]
    assert all(any(t <= a and m <= b for t, m in edge) for a, b in every)


def test_each_knobs_best_is_the_best_with_it() -> None:
    found = narrow()
    for word, s in found.by_knob["tp"].items():
        alone = search(small(), 16, keep={**NARROW, "tp": frozenset({word})})
        assert (job_plan(alone.best[0].job), alone.best[0].seconds) == (s.layout, pytest.approx(s.seconds, rel=1e-12))
    assert {"none", "full"} <= set(found.by_knob["recompute"])


def test_processes_find_the_same() -> None:
    same(narrow(), search(small(), 16, keep=NARROW, workers=2))


def test_a_limit_is_kept_and_told() -> None:
    found = search(small(), 16, keep=NARROW, limit=20)
    assert found.counts.priced == 20 and not found.complete and narrow().complete


def test_a_model_too_large_for_its_gpus_finds_nothing() -> None:
    found = search(job(preset("llama3.1-405b"), 8, 8), 8)
    assert found.best == () and found.front == () and found.counts.fit == 0
    assert found.counts.smallest > 80e9


def test_the_jobs_own_plan_stands_beside_the_best() -> None:
    own, found, tight = small(), narrow(), parse_keep(["tp=1,cp=1,pp=1,recompute=full"])
    assert found.own is not None and found.own.job == own and found.own.seconds >= found.best[0].seconds
    elsewhere = search(own, 32, keep=tight).own
    assert elsewhere is not None and elsewhere.job == replace(own, gpus=32)
    wide = replace(own, parallel=replace(own.parallel, tp=8))
    assert search(wide, 4, keep=tight).own is None


def test_progress_is_told() -> None:
    told = []
    search(small(), 16, keep=NARROW, tell=told.append)
    assert [p.what for p in told] == sorted((p.what for p in told), reverse=True)
    assert told[-1].best < float("inf") and told[0].plans < told[-1].plans


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (16, {"objective": "p99"}, "objective"),
        (16, {"objective": "best"}, "mean, cost"),
        (10**9, {}, "has 1 to"),
        (37, {}, "no legal plan on 37"),
        (16, {"keep": {"tp": frozenset({"5"})}}, "tp 5"),
    ],
)
def test_what_cannot_be_searched_is_told(gpus: int, options: dict[str, object], said: str) -> None:
    with pytest.raises(PresageError, match=said):
        search(small(), gpus, **options)  # type: ignore[arg-type]


def test_a_job_that_no_plan_can_run_is_told_why() -> None:
    with pytest.raises(PresageError, match="no nvfp4"):
        search(replace(small(), precision="nvfp4"), 16)


# ---- why


def test_differences_add_up() -> None:
    found = narrow()
    d = compare_plans(found.best[0], found.best[-1])
    assert d.knobs and d.seconds >= 0
    rest = len(found.best[0].breakdown) * 0.002 * found.best[0].seconds  # parts too small to tell
    assert sum(s for _, s in d.parts) == pytest.approx(d.seconds, abs=rest)


def test_what_memory_rules_out_is_faster_and_does_not_fit() -> None:
    found = search(replace(small("llama3.1-70b", 64), global_batch=256), 64, keep=parse_keep(["tp=8,cp=1"]))
    near = found.too_large
    assert near, "a 70B model on 64 GPUs is short of memory"
    for m in near:
        again = predict_plan(apply_plan(small("llama3.1-70b", 64), m.layout))
        assert not again.memory.fits and m.seconds < found.best[0].seconds
