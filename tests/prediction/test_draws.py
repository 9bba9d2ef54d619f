"""Draws of a job's step: no noise gives the prediction, folding gives what brute force gives, scale costs more."""

from dataclasses import replace

import numpy as np
import pytest

from presage.engine import finish_times
from presage.noise.distribution import Fixed, Gamma, LogNormal, Normal
from presage.noise.model import (
    CLASSES,
    NO_NOISE,
    Belief,
    CommonNoise,
    CredibleInterval,
    NetworkRegimes,
    NoiseModel,
    SlowGpus,
    Stalls,
    WorkSpread,
)
from presage.noise.sampling import estimate
from presage.prediction.draws import (
    DrawRequest,
    StepModel,
    draw,
    draw_all,
    scale_class,
    step_distribution,
    step_model,
    without_fitted_stragglers,
)
from presage.prediction.draws.noise_sets import SETS, even_noises
from presage.prediction.draws.replica_pools import Gpus, Replica, common_shift, drawn_gpus, ratios
from presage.prediction.jobs.job_prediction import predict_job

EXAMPLE = "examples/jobs/llama3.1-405b.toml"
GPUS = NoiseModel(
    {"products": WorkSpread(0.02, 0, 0.03), "attention": WorkSpread(0.02, 0, 0.03)},
    SlowGpus(0.001, LogNormal(1.12, 0.03)),
)


def job_shape(gpus: int, pp: int, batch: int, virtual: int = 1, **parallel: object) -> StepModel:
    over = {"gpus": gpus, "pp": pp, "virtual": virtual, "dp": None, **parallel}
    found = predict_job(EXAMPLE, {"parallel": over, "training": {"global_batch": batch}})
    return step_model(found.job, found.job_step)


@pytest.fixture(scope="module")
def small() -> StepModel:
    return job_shape(2048, 4, 256)


def every_gpu(shape: StepModel, noise: NoiseModel, rng: np.random.Generator) -> Gpus:
    """Of every stage of every replica the slowest GPU, found among all of them."""
    size = shape.together, shape.stages, shape.replicas
    slow = np.where(rng.random(size) < noise.slow.share, noise.slow.factor.sample(rng, size), 1.0)
    return Gpus(rng.standard_normal(size).max(axis=0), slow.max(axis=0))


def brute_force(shape: StepModel, noise: NoiseModel, runs: int, steps: int, seed: int) -> np.ndarray:
    """Every replica of every step through the engine, one by one."""
    rng, replica = np.random.default_rng(seed), Replica.of(shape, 10**9)
    program, row = replica.tasks
    sd = np.sqrt(sum((replica.shares[k] * noise.of(c).own) ** 2 for k, c in enumerate(CLASSES)))
    works = replica.shares.sum(axis=0)[row] > 0
    out = np.empty((runs, steps))
    for r in range(runs):
        usual = replica.base[:, None] * ratios(replica, noise, every_gpu(shape, noise, rng))
        for s in range(steps):
            seconds = usual[row] * np.exp(sd[row][:, None] * rng.standard_normal((len(row), shape.replicas)))
            load = noise.load.sample(rng, (replica.schedule.microbatches, shape.replicas))
            seconds[works] *= load[replica.microbatch[works]]
            out[r, s] = finish_times(program, seconds).max()
    return out + shape.seconds - shape.pipeline.total


@pytest.mark.parametrize("load", [Fixed(1.0), Gamma(1.0, 0.3)], ids=["equal microbatches", "packed sequences"])
@pytest.mark.parametrize(
    ("gpus", "pp", "batch"), [(2048, 4, 256), pytest.param(16384, 8, 2048, marks=pytest.mark.slow)]
)
def test_folding_equals_brute_force(load, gpus: int, pp: int, batch: int) -> None:
    """Quantiles of steps agree within 3.5 standard errors of the two."""
    shape = job_shape(gpus, pp, batch)
    noise = NoiseModel(GPUS.spread, GPUS.slow, load=load)
    all_of_them, folded = brute_force(shape, noise, 300, 4, 1), draw(shape, noise, 0, 24_000, 4)
    for p in (0.05, 0.5, 0.9, 0.95):
        slow = estimate(all_of_them, lambda x, p=p: float(np.quantile(x, p)))
        fast = folded.quantile(p)
        assert abs(slow.value - fast.value) < 3.5 * np.hypot(slow.error, fast.error), p
        assert fast.value == pytest.approx(slow.value, rel=0.02)


def test_folding_keeps_who_is_slow(small: StepModel) -> None:
    """Within a run steps differ by what is drawn anew, not by the GPUs: a plain power of one distribution would mix."""
    slow = brute_force(small, GPUS, 200, 5, 2)
    fast = draw(small, GPUS, 0, 10_000, 5)
    assert fast.step_sd == pytest.approx((slow / slow.mean(axis=1, keepdims=True)).std() * np.sqrt(5 / 4), rel=0.15)
    assert np.log(fast.seconds.mean(axis=1)).std() == pytest.approx(np.log(slow.mean(axis=1)).std(), rel=0.15)


def test_one_draw_without_noise_is_the_prediction(small: StepModel) -> None:
    assert np.allclose(draw(small, NO_NOISE, count=1).seconds, small.seconds, rtol=1e-12)
    assert draw(small, NO_NOISE).quantile(0.95).error == pytest.approx(0.0, abs=1e-9)


def test_classes_add_up_to_the_passes(small: StepModel) -> None:
    d = small.pipeline.durations
    assert np.allclose(small.work.sum(axis=0)[0], d.forward)
    assert np.allclose(small.work.sum(axis=0)[1] + small.work.sum(axis=0)[2], d.backward + d.weight)


def test_everything_slower_is_slower_by_as_much(small: StepModel) -> None:
    factors = np.full((len(CLASSES), 3), 1.0)
    factors[:, 1], factors[:, 2] = 1.1, 2.0
    sends = small.pipeline.total - common_shift(small, np.full((len(CLASSES), 1), 1e-9))[0] * small.pipeline.total
    found = common_shift(small, factors)
    assert found[0] == pytest.approx(1.0)
    assert np.allclose(found[1:], [1.1, 2.0], rtol=1 - sends / small.pipeline.total + 1e-9)


def test_a_run_of_many_microbatches_is_folded() -> None:
    many = job_shape(2048, 4, 32 * 512)
    replica = Replica.of(many, 0)
    assert replica.left > 300
    assert replica.seconds(np.ones((len(replica.base), 1)))[0] == pytest.approx(many.pipeline.total)
    slower = ratios(replica, GPUS, drawn_gpus(many, GPUS, np.random.default_rng(0), 20, True))
    whole = Replica(many, many.pipeline.schedule)
    assert np.allclose(replica.seconds(slower), whole.seconds(slower), rtol=1e-3)


def test_more_gpus_wait_longer_for_the_slowest() -> None:
    quantiles = [draw(job_shape(n, 8, n // 4), GPUS, 0, 4_000).quantile(0.5) for n in (1024, 8192, 65536)]
    ratio = [q.value for q in quantiles]
    assert ratio[0] < ratio[1] < ratio[2]


def test_the_median_of_a_usual_job_is_its_prediction() -> None:
    """64 GPUs: the laws were fitted to such jobs, so their stragglers are in them; of many GPUs only the rest comes."""
    shape, noise = job_shape(64, 4, 32), NoiseModel({"products": WorkSpread(0.02), "attention": WorkSpread(0.02)})
    assert draw(without_fitted_stragglers(shape, noise), noise).quantile(0.5).value == pytest.approx(
        shape.seconds, rel=0.01
    )
    many = job_shape(65536, 8, 65536 // 4)
    more = [float(Normal(0.0, 0.02).largest(n).quantile(0.5)) for n in (64, 65536)]
    found = draw(without_fitted_stragglers(many, noise), noise).quantile(0.5).value / many.seconds
    assert 1.0 < found < np.exp(more[1] - more[0])  # pipelines have slack


def test_congestion_costs_what_the_cost_model_says(small: StepModel) -> None:
    jam = NoiseModel(network=NetworkRegimes((1.0, 4.0), ((0.5, 0.5), (0.5, 0.5))))
    found = draw(small, jam, 0, 2_000)
    more = sum(float(small.later(k, np.array([4.0]))[0]) for k in small.curves if k in small.across)
    assert more > 0
    assert np.allclose(np.unique(found.seconds.round(9)), [small.seconds, small.seconds + more])
    assert (found.seconds > small.seconds + more / 2).mean() == pytest.approx(0.5, abs=0.05)
    slower = scale_class(small, "dp", 4.0).seconds - small.seconds
    assert float(small.later("dp", np.array([4.0]))[0]) == pytest.approx(slower, rel=0.25, abs=1e-6)


def test_common_random_numbers(small: StepModel) -> None:
    """A source that is taken out moves nothing else; a seed gives the same bytes."""
    noise = NoiseModel(
        GPUS.spread, common=CommonNoise(sd=0.01, jitter=Normal(0.0, 0.02)), stalls=Stalls(1.0, LogNormal(2.0, 0.5))
    )
    with_all, again = draw(small, noise, 7, 2_000), draw(small, noise, 7, 2_000)
    assert (with_all.seconds == again.seconds).all()
    calm = draw(small, noise.changed({"stalls.per_node_hour": 0.0}), 7, 2_000)
    stalled = with_all.seconds - calm.seconds
    assert (stalled >= -1e-9).all() and 0 < (stalled > 0.1).mean() < 0.9
    assert not (draw(small, noise, 8, 2_000).seconds == with_all.seconds).any()


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_draws(small: StepModel) -> None:
    noise = NoiseModel(GPUS.spread, GPUS.slow, common=CommonNoise(sd=0.01))
    found = [draw(small, noise, seed, 8_000).quantile(0.95) for seed in range(12)]
    spread = np.std([e.value for e in found], ddof=1)
    told = np.mean([e.error for e in found])
    assert 0.5 < told / spread < 2.0


def test_intervals_hold_what_the_noise_may_be(small: StepModel) -> None:
    belief = Belief(GPUS, {"spread.products.rank": CredibleInterval(0.005, 0.05)})
    sure, fixed = step_distribution(small, belief, count=4_000), step_distribution(small, Belief(GPUS), count=4_000)
    e = sure.quantile(0.95)
    assert e.low is not None and e.high is not None and e.low < e.value < e.high
    assert e.high - e.low > 4 * e.error
    assert fixed.quantile(0.95).low is None
    assert fixed.exceeds(fixed.quantile(0.95).value).value == pytest.approx(0.05, abs=0.01)


def test_steps_and_runs_have_different_quantiles(small: StepModel) -> None:
    """What is drawn anew in every step evens out over a run; what stays does not."""
    anew = draw(small, NoiseModel(common=CommonNoise(sd=0.05)), 0, 10_000)
    assert anew.quantile(0.95).value / anew.quantile(0.5).value == pytest.approx(np.exp(1.645 * 0.05), rel=0.01)
    assert anew.run_quantile(0.95).value / anew.run_quantile(0.5).value < 1.015
    stays = draw(small, NoiseModel(common=CommonNoise(run_sd=0.05)), 0, 10_000)
    assert stays.run_quantile(0.95).value / stays.run_quantile(0.5).value == pytest.approx(
        np.exp(1.645 * 0.05), rel=0.02
    )


@pytest.mark.parametrize(
    "parallel",
    [{"pp": 1, "tp": 8, "zero": 3}, {"schedule": "zero-bubble", "pp": 8}, {"schedule": "gpipe", "pp": 8}],
    ids=["ZeRO-3", "zero-bubble", "gpipe"],
)
def test_other_ways_to_spread_a_job_can_be_drawn(parallel: dict[str, object]) -> None:
    found = predict_job(EXAMPLE, {"parallel": {"gpus": 4096, "dp": None, "virtual": 1, **parallel}})
    shape = step_model(found.job, found.job_step)
    assert np.allclose(draw(shape, NO_NOISE, count=20).seconds, found.seconds, rtol=1e-9)
    e = draw(shape, GPUS, 0, 2_000).quantile(0.95)
    assert found.seconds < e.value < 1.6 * found.seconds


@pytest.mark.slow
def test_65536_gpus_take_bounded_memory() -> None:
    """The time is in bench/draws.py."""
    import tracemalloc

    shape = job_shape(65536, 16, 8192, 8)
    draw(shape, GPUS, 0, 100)
    tracemalloc.start()
    draw(shape, GPUS, 0, 10_000)
    assert tracemalloc.get_traced_memory()[1] < 500e6
    tracemalloc.stop()


# ---- intervals, far quantiles, records of several steps


def test_ends_of_intervals_repeat_over_seeds(small: StepModel) -> None:
    """A heavy tail that few noise models have must not move the end of the interval with the seed."""
    stalls = Stalls(0.6, LogNormal(2.0, 0.5))
    noise = NoiseModel(common=CommonNoise(sd=0.003), stalls=stalls)
    belief = Belief(noise, {"stalls.per_node_hour": CredibleInterval(0.05, 8.0)})
    found = [step_distribution(small, belief, seed, 2_000).quantile(0.95) for seed in range(2)]
    ends = np.array([e.high for e in found])
    assert np.ptp(ends) / ends.mean() < 0.02
    assert all(e.end_errors is not None and e.end_errors[1] < 0.02 * ends.mean() for e in found)


def test_even_noises_fill_their_intervals() -> None:
    belief = Belief(NoiseModel(common=CommonNoise(sd=0.01)), {"common.sd": CredibleInterval(0.005, 0.02)})
    values = np.sort([n.common.sd for n in even_noises(belief, np.random.default_rng(0))])
    assert len(values) == SETS
    assert np.quantile(values, [0.05, 0.5, 0.95]) == pytest.approx([0.005, 0.01, 0.02], rel=0.03)


def test_far_quantiles_have_bounds(small: StepModel) -> None:
    """Of log-normal steps: p99.9 is known, and not above its bound; too few draws give none."""
    sd = 0.02
    noise = Belief(NoiseModel(common=CommonNoise(sd=sd)))
    found = step_distribution(small, noise, 0, 40_000)
    exact = small.seconds * np.exp(3.0902 * sd)
    e, bound = found.quantile(0.999), found.bound(0.999)
    assert e.value == pytest.approx(exact, rel=0.003)
    assert bound is not None and e.value <= bound < 1.03 * exact
    assert step_distribution(small, noise, 0, 2_000).bound(0.999) is None


def test_records_are_means_of_consecutive_steps(small: StepModel) -> None:
    """Independent noise averages out over a record, what goes with the step before does less, what stays does not."""

    def spread(common: CommonNoise) -> float:
        found = step_distribution(small, Belief(NoiseModel(common=common)), 0, 4_000, record=16)
        return float(np.log(found.draws.seconds).std())

    assert spread(CommonNoise(sd=0.04)) == pytest.approx(0.01, rel=0.1)
    phi = 0.8
    exact = 0.04 / 16 * np.sqrt(16 + 2 * sum((16 - k) * phi**k for k in range(1, 16)))
    assert spread(CommonNoise(sd=0.04, correlation=phi)) == pytest.approx(exact, rel=0.1)
    assert spread(CommonNoise(run_sd=0.04)) == pytest.approx(0.04, rel=0.05)


def test_even_draws_are_those_of_the_distribution(small: StepModel) -> None:
    noise = NoiseModel(common=CommonNoise(sd=0.02, jitter=Normal(0.0, 0.01)), stalls=Stalls(0.5, LogNormal(1.0, 0.3)))
    request = DrawRequest(small, noise, 20_000)
    plain, even = (next(draw_all([replace(request, evenly=e)], 3))[1] for e in (False, True))
    for p in (0.05, 0.5, 0.95, 0.99):
        a, b = plain.quantile(p), even.quantile(p)
        assert abs(a.value - b.value) < 4 * np.hypot(a.error, b.error) + 0.002 * a.value
