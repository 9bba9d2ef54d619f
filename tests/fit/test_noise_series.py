"""The series model: laws, planted parameters found again, calibrated predictions, readers of logs."""

import json

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.distribution import LogNormal, Normal
from presage.noise.files import format_noise, parse_noise
from presage.noise.model import NO_NOISE, CommonNoise, NoiseModel, Stalls
from presage_fit.series import SeriesFit, SeriesPrior, fit, learn
from presage_fit.series.drift import joint, kinds_of, smooth
from presage_fit.series.model import continue_series, settled, slow_share, steps_of
from presage_fit.series.prior import prior_of, prior_table, shipped
from presage_fit.series.residuals import CELLS, ODD, SDS, SLOWER, evidence, learn_levels
from presage_fit.step_logs import LogEvent, StepLog, step_log

LEVEL = 10.0
PLANTED = NoiseModel(
    common=CommonNoise(sd=0.003, correlation=0.85, drift=0.01, run_sd=0.002, jitter=Normal(0.0, 0.03)),
    stalls=Stalls(0.02, LogNormal(2.0, 0.8)),
)


def group_of(
    noise: NoiseModel, rng: np.random.Generator, runs: int = 3, steps: int = 200, nodes: int = 100
) -> list[StepLog]:
    drawn = steps_of(noise, LEVEL, nodes, steps, rng, runs)
    meta = {"nodes": nodes}
    return [step_log(f"run {i}", "planted", np.arange(steps), row, meta=meta) for i, row in enumerate(drawn)]


def logs(*rows: np.ndarray, events: tuple[LogEvent, ...] = ()) -> list[StepLog]:
    return [step_log(f"run {i}", "g", np.arange(len(r)), r, events=events) for i, r in enumerate(rows)]


# ---- laws


def test_no_noise_is_a_constant() -> None:
    assert np.ptp(steps_of(NO_NOISE, 3.0, 10, 50, np.random.default_rng(0), 4)) == 0
    found = fit(logs(np.full(300, 3.0), np.full(300, 3.0)))
    drawn = found.predict(np.arange(300), rng=np.random.default_rng(0), draws=100).draws
    within = np.quantile(drawn, 0.9, axis=1) - np.quantile(drawn, 0.1, axis=1)
    assert np.median(within) < 2e-3 * 3.0  # what is left is the drift that other groups' runs had
    assert found.bulk.widths.max() == 0 and not found.bulk.stalls.any()
    assert float(np.median(drawn)) == pytest.approx(3.0, rel=1e-3)


def test_scale_does_not_matter() -> None:
    rows = steps_of(PLANTED, LEVEL, 10, 150, np.random.default_rng(1), 2)
    one, other = fit(logs(*rows)), fit(logs(*(rows * 7)))
    assert other.level == pytest.approx(7 * one.level)
    assert other.bulk.widths == pytest.approx(one.bulk.widths)
    assert other.shared.levels == pytest.approx(one.shared.levels)


def test_order_of_runs_does_not_matter() -> None:
    rows = steps_of(PLANTED, LEVEL, 10, 150, np.random.default_rng(2), 3)
    one, other = fit(logs(*rows)), fit(logs(*rows[::-1]))
    assert other.level == one.level and sorted(other.bulk.widths) == pytest.approx(sorted(one.bulk.widths))
    assert other.cells == pytest.approx(one.cells)


def test_same_seed_same_draws() -> None:
    found = fit(group_of(PLANTED, np.random.default_rng(3)))
    first, second = (found.predict(np.arange(60), rng=np.random.default_rng(5), draws=40).draws for _ in range(2))
    assert (first == second).all()
    assert (found.predict(np.arange(60), rng=np.random.default_rng(6), draws=40).draws != first).any()


def test_more_jitter_more_spread() -> None:
    spreads = []
    for width in (0.01, 0.05, 0.2):
        noise = NoiseModel(common=CommonNoise(jitter=Normal(0.0, width)))
        p = fit(group_of(noise, np.random.default_rng(4))).predict(np.arange(100), rng=np.random.default_rng(0))
        spreads.append(p.pooled.sd)
    assert spreads[0] < spreads[1] < spreads[2]


def test_slow_steps_are_expected_where_they_were() -> None:
    rng = np.random.default_rng(7)
    rows = LEVEL + 0.02 * rng.standard_normal((2, 120))
    rows[:, 0] += 4.0  # first step
    rows[:, 41] += 2.0  # after the first validation
    rows[:, 81] += 0.3
    rows[:, 100] += 6.0  # at one place, for no known reason
    events = (LogEvent("validation", 40), LogEvent("validation", 80))
    p = fit(logs(*rows, events=events)).predict(np.arange(120), events, rng=np.random.default_rng(0))
    assert p.step(0).mean == pytest.approx(14.0, abs=0.8)
    assert np.median(p.draws[:, 41]) == pytest.approx(12.0, abs=0.2)
    assert np.median(p.draws[:, 81]) == pytest.approx(10.3, abs=0.1)
    assert p.draws[:, 98:103].sum(axis=1).mean() - 50 > 4.0
    moved = fit(logs(*rows, events=events)).predict(np.arange(120), (LogEvent("validation", 50),))
    assert np.median(moved.draws[:, 51]) == pytest.approx(12.0, abs=0.2) and np.median(moved.draws[:, 41]) < 10.1


def test_timers_go_by_the_clock() -> None:
    """Runs of different pace stall at the same time, so at different steps."""
    rng = np.random.default_rng(9)
    rows = LEVEL * np.array([1.0, 1.05, 1.1])[:, None] + 0.02 * rng.standard_normal((3, 200))
    at = [int(np.searchsorted(np.cumsum(row), 1500.0)) for row in rows]
    for row, k in zip(rows, at, strict=True):
        row[k] += 20
    found = fit(logs(*rows))
    (again,) = found.stalls.recurring
    assert again.by_clock and again.place * found.level == pytest.approx(1500, abs=30) and len(set(at)) == 3
    drawn = found.predict(np.arange(200), rng=np.random.default_rng(0), draws=200).draws
    when = [float(row[: int(np.argmax(row))].sum()) for row in drawn if row.max() > 20]
    assert len(when) > 140 and np.median(when) == pytest.approx(1500, abs=30)


def test_drift_is_followed_and_goes_on_slower() -> None:
    place = np.arange(200)
    rows = LEVEL * (1 + 0.02 * (1 - np.exp(-place / 60))) + 0.01 * np.random.default_rng(8).standard_normal((2, 200))
    p = fit(logs(*rows)).predict(np.arange(240), rng=np.random.default_rng(0))
    middle = np.median(p.draws, axis=0)
    planted = LEVEL * (1 + 0.02 * (1 - np.exp(-place / 60)))
    assert middle[10:200] == pytest.approx(planted[10:], rel=1.5e-3)
    assert middle[195] <= middle[239] < 1.03 * LEVEL


def test_smoothing_keeps_lines_and_ignores_spikes() -> None:
    line = 1 + 0.01 * np.arange(300.0)
    line[[50, 200]] += 9
    line[120] = np.nan
    values, width = smooth(line, 3)
    assert values[5:295] == pytest.approx((1 + 0.01 * np.arange(300.0))[5:295], abs=0.01) and width > 3


def drifting(rng: np.random.Generator, runs: int, records: int, noise: float = 0.0003) -> np.ndarray:
    """Runs of few records that settle, drift together and differ in pace."""
    k = np.arange(records)
    curve = 0.01 * np.exp(-k / 1.5) + 0.012 * k / records
    return LEVEL * (1 + curve + 0.002 * rng.standard_normal((runs, 1)) + noise * rng.standard_normal((runs, records)))


def means(rows: np.ndarray, **more: object) -> list[StepLog]:
    steps = 32 * np.arange(1, rows.shape[1] + 1) - 1
    return [step_log(f"run {i}", "g", steps, row, 32, **more) for i, row in enumerate(rows)]  # type: ignore[arg-type]


def test_few_records_share_their_drift() -> None:
    """Two runs of eight means: the third's are known but for its pace."""
    off = []
    for seed in range(20):
        logs = means(drifting(np.random.default_rng(seed), 3, 8))
        middle = np.median(fit(logs[:2]).predict_like(logs[2], np.random.default_rng(0), 200).draws, axis=0)
        left = (logs[2].seconds / middle)[1:]
        off.append(np.std(left))
    assert np.median(off) < 0.0006  # a flat level would be 0.4% off


def test_a_stall_in_one_of_two_runs_is_no_bend() -> None:
    rows = drifting(np.random.default_rng(3), 2, 8)
    curves = []
    for seconds in (0.0, 0.5):
        stalled = rows.copy()
        stalled[0, 4] += seconds
        found = fit(means(stalled))
        curves.append(found.level * (1 + found.shared.curve.values + found.shared.levels.mean()))
        assert found.bulk.stalls.sum() == (seconds > 0)
    assert curves[1] == pytest.approx(curves[0], rel=0.0006)  # half of the stall would be 2.5%


def test_joint_curve_keeps_lines_and_says_what_it_takes() -> None:
    k, plain = np.arange(10.0), np.ones((3, 10), bool)
    x = np.array([0.0, 0.01, -0.02])[:, None] + 0.003 * k
    found = joint(x, plain)
    assert found.levels[:, None] + found.values == pytest.approx(x, abs=1e-6)
    noisy = joint(0.01 * np.random.default_rng(0).standard_normal((3, 10)), plain)
    assert 4 / 30 - 1e-6 <= noisy.known < 0.35  # three levels and a line at least


def test_means_of_records() -> None:
    log = step_log(
        "r", "g", np.arange(70), np.arange(1.0, 71.0), events=[LogEvent("validation", 39)], ends=np.arange(70.0)
    )
    found = log.means(32)
    assert list(found.steps) == [31, 63] and found.seconds == pytest.approx([16.5, 48.5])
    assert found.stride == 32 and found.kind == "means of 32 steps" and list(found.ends) == [31.0, 63.0]
    assert kinds_of(found.steps, found.events, 1) == ("step 1 of a run", "after the first validation")
    with pytest.raises(PresageError, match="fewer than 99"):
        log.means(99)


# ---- planted parameters are found again


def test_planted_numbers_lie_in_their_intervals() -> None:
    rng, hits = np.random.default_rng(11), []
    for _ in range(20):
        belief = fit(group_of(PLANTED, rng, runs=3, steps=300), SeriesPrior()).belief()
        for path, planted in (("common.correlation", 0.85), ("common.sd", 0.003), ("stalls.per_node_hour", 0.02)):
            i = belief.intervals[path]
            hits.append((path, i.low <= planted <= i.high))
    for path in dict(hits):
        share = np.mean([h for p, h in hits if p == path])
        assert share >= 0.75, (path, share)


def test_planted_drift_and_stalls() -> None:
    logs = [group_of(PLANTED, np.random.default_rng(seed), 8, 600) for seed in range(12, 16)]
    fitted = [fit(group, SeriesPrior()).belief().noise for group in logs]
    stalls = fitted[0].stalls
    assert fitted[0].common.drift == pytest.approx(0.01, abs=0.002)
    assert np.mean([n.common.run_sd for n in fitted]) == pytest.approx(
        0.002, rel=0.7
    )  # of eight runs: of one group +-40%
    assert stalls.per_node_hour == pytest.approx(0.02, rel=0.5) and stalls.seconds.quantile(0.5) == pytest.approx(
        2, rel=0.4
    )


def test_grid_finds_white_noise_and_a_random_walk_apart() -> None:
    rng = np.random.default_rng(13)
    share = np.array([s for _, s in CELLS])
    white = fit(logs(*(LEVEL + 0.02 * rng.standard_normal((3, 300)))), SeriesPrior())
    slow = NoiseModel(common=CommonNoise(sd=0.005, correlation=0.96))
    assert white.cells @ share < 0.15 < 0.6 < fit(group_of(slow, rng), SeriesPrior()).cells @ share


def planted_groups(n: int, seed: int) -> list[list[StepLog]]:
    """Groups whose own numbers differ, as systems' do."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        common = CommonNoise(
            sd=0.002 * rng.lognormal(0, 0.4), correlation=0.7, drift=0.01 * rng.standard_normal(), drift_sd=0.0005,
            run_sd=0.0015 * rng.lognormal(0, 0.5), jitter=Normal(0.0, 0.02 * rng.lognormal(0, 0.4)),
        )  # fmt: skip
        noise = NoiseModel(common=common, stalls=Stalls(0.03 * rng.lognormal(0, 0.7), LogNormal(1.0, 1.0)))
        found.append(group_of(noise, rng, runs=3, steps=90))
    return found


def test_predictions_of_planted_groups_are_calibrated() -> None:
    """Two runs fitted, the third predicted, 40 times: quantiles hold as often as they say."""
    prior = learn([fit(g, SeriesPrior()) for g in planted_groups(20, 21)])
    below, inside, rng = [], [], np.random.default_rng(0)
    for group in planted_groups(40, 22):
        p = fit(group[:2], prior).predict_like(group[2], rng, 300)
        seen = group[2].seconds
        below.append([(seen <= p.quantile(q)).mean() for q in (0.5, 0.95)])
        low, high = p.total.quantile([0.05, 0.95])
        inside.append(low <= group[2].total <= high)
    half, most = np.mean(below, axis=0)
    assert 0.45 <= half <= 0.55 and 0.93 <= most <= 0.97
    assert 0.84 <= np.mean(inside) <= 0.97


# ---- priors


def test_shipped_priors_read_back_as_written() -> None:
    plain, means = (step_log("r", "g", [31, 63], [1.0, 1.0], counts) for counts in (1, 32))
    blocks = step_log("r", "g", [0, 1], [1.0, 1.0], 40, blocks=True)
    assert len({id(shipped(x)) for x in (plain, means, blocks)}) == 3
    for log in (plain, means, blocks):
        prior = shipped(log)
        again = prior_of(json.loads(json.dumps(prior_table(prior))))
        assert again.slope == prior.slope and again.bulk == prior.bulk and again.stall_rate == prior.stall_rate
        assert again.cells == pytest.approx(prior.cells, abs=1e-3)
        assert again.levels.weights.sum() == pytest.approx(1) and prior.groups >= 14


def test_two_close_runs_do_not_rule_an_odd_one_out() -> None:
    rng = np.random.default_rng(0)
    others = [fit(logs(*(LEVEL * (1 + np.array([0.0, 0.0005, 0.012])[:, None]) + 0.01 * rng.standard_normal((3, 60)))))
              for _ in range(8)]  # fmt: skip
    close = logs(*(LEVEL + 0.01 * rng.standard_normal((2, 60))))
    levels = [fit(close, learn(o)).levels.next_run(np.random.default_rng(1), 4000) for o in (others, [])]
    assert (levels[0] > 0.006).mean() > 0.08
    assert abs(np.median(levels[0])) < 0.001


def test_evidence_of_levels_is_a_density() -> None:
    """Of one run among two, the other at 0: over all places its likelihood adds up to the same for all cells."""
    places = np.linspace(-0.3, 0.5, 4001)
    total = np.sum([np.exp(evidence(np.array([0.0, p]))) for p in places[::16]], axis=0) * 16 * (places[1] - places[0])
    inner = (SDS > 2e-3) & (SDS < 2e-2)
    assert total[inner][..., SLOWER < 0.02] == pytest.approx(1, rel=0.1)


def test_odd_runs_are_found_again() -> None:
    rng = np.random.default_rng(5)
    groups = [
        0.0003 * rng.standard_normal(3) + np.where(rng.random(3) < 0.15, rng.gamma(2, 0.004, 3), 0) for _ in range(60)
    ]
    weights = learn_levels([evidence(g) for g in groups]).weights
    assert weights.sum((0, 2)) @ ODD == pytest.approx(0.15, abs=0.06)
    assert weights.sum((0, 1)) @ SLOWER == pytest.approx(0.008, rel=0.4)


def test_prior_needs_three_groups() -> None:
    assert learn([]).groups == 0


# ---- as a noise model


def test_belief_is_written_and_read_back() -> None:
    import tomllib

    belief = fit(group_of(PLANTED, np.random.default_rng(31))).belief("my logs")
    again = parse_noise(tomllib.loads(format_noise(belief)))
    assert again.noise.numbers() == pytest.approx(belief.noise.numbers())
    assert set(again.intervals) == set(belief.intervals) and again.sources["common"] == "my logs"
    assert isinstance(belief.drawn(np.random.default_rng(0)), NoiseModel)


def test_belief_draws_steps_like_the_log() -> None:
    group = group_of(PLANTED, np.random.default_rng(32), runs=4, steps=400)
    noise = fit(group).belief().noise
    drawn = steps_of(noise, LEVEL, 100, 400, np.random.default_rng(0), 200)
    seen = np.concatenate([g.seconds for g in group])
    for p in (0.5, 0.9, 0.95):
        assert np.quantile(drawn, p) == pytest.approx(np.quantile(seen, p), rel=0.005)


# ---- a series that goes on


def test_settled_and_continued() -> None:
    rng = np.random.default_rng(41)
    values = 1 + 0.001 * rng.standard_normal(4000)
    values[:300] += 0.1
    assert 200 <= settled(values) <= 500
    assert settled(values[300:]) == 0
    drawn = continue_series(values, 1000, rng, 50)
    assert drawn.shape == (50, 1000) and np.quantile(drawn, 0.95) < 1.01
    assert slow_share(values[300:]) < 0.1 < 0.9 < slow_share(np.repeat(rng.standard_normal(40), 100))


@pytest.mark.parametrize("n", [1, 2, 6, 17, 41])
@pytest.mark.parametrize("runs", [1, 2, 6])
@pytest.mark.parametrize("stride", [1, 32])
def test_short_logs_are_fitted(n: int, runs: int, stride: int) -> None:
    rng = np.random.default_rng(n)
    rows = 1 + 0.1 * rng.random((runs, n))
    found: SeriesFit = fit(logs(*rows) if stride == 1 else means(rows))
    p = found.predict(stride * np.arange(n + 3), rng=rng, draws=50)
    assert np.isfinite(p.draws).all() and (p.draws > 0).all()
    assert format_noise(found.belief())
