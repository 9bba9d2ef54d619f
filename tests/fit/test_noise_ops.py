"""Random effects of per-operation tables: planted ones are found, draws keep what belongs together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from planted_ops import Planted, table_of, true_times
from presage.engine import finish_times
from presage.errors import InputError
from presage.noise.files import format_noise, parse_noise
from presage_fit.ops.effects import OpEffects, fit, fit_sets, iid_pool, steps_only
from presage_fit.ops.parts import Channels, levels
from presage_fit.ops.pool import ENOUGH, cells_of, pool_of
from presage_fit.ops.sizes import sizes_of
from presage_fit.opsteps import messages, split
from presage_fit.optable import BACKWARD, FORWARD, OpTable
from presage_validation.temporal import wasserstein

Floats = NDArray[np.float64]
STEPS = 44
VARIED = Planted()  # 128 GPUs: dp 32, pp 2, pairs that share sequences folded into one worker, 8 microbatches
STEADY = Planted(replicas=4, stages=4, forward=0.02, backward=0.03, own=0.01)
COLUMNS = ("op", "dp", "stage", "rank", "step", "seq", "chunk", "microbatch", "model_chunk", "start", "duration")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def without(table: OpTable, *names: str) -> OpTable:
    """The table with no rows of some operation types."""
    keep = ~np.isin(table.op, [table.ops.index(n) for n in names])
    return replace(table, **{c: getattr(table, c)[keep] for c in COLUMNS})


@pytest.fixture(scope="module")
def varied() -> OpEffects:
    table = table_of(VARIED, STEPS)
    return fit(table, table.steps[::2])


@pytest.fixture(scope="module")
def truth() -> Floats:
    return np.sort(true_times(VARIED, 1500))


# ---- what belongs together -------------------------------------------------------------------------------------------


def test_a_microbatch_and_its_transfers_are_one_cell() -> None:
    steps = split(table_of(Planted(replicas=2, stages=2, microbatches=4), 3))[0]
    cells = cells_of(steps, messages(steps))
    assert cells.shape == (2, 4, 6)  # forward and backward on two stages, and a message each way
    assert len(cells) == 2 * 4 * 6
    assert [c.op for c in cells.columns if not c.computes] == ["backward-send", "forward-send"]
    back = np.zeros(len(steps))
    back[cells.op] = cells.gathered(cells.spread_out(np.arange(len(steps), dtype=float)))
    assert (back[cells.op] == cells.op).all()


def test_chunks_of_a_microbatch_are_columns() -> None:
    table = table_of(Planted(replicas=2, stages=2, microbatches=4, chunks=2, schedule="interleaved"), 4)
    steps = split(table)[0]
    cells = cells_of(steps, messages(steps))
    assert cells.shape[:2] == (2, 4)
    assert {(c.stage, c.chunk) for c in cells.columns if c.op == FORWARD} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_microbatches_without_numbers_go_by_their_order() -> None:
    table = table_of(Planted(replicas=2, stages=2, microbatches=4), 3)
    bare = replace(table, microbatch=np.full(len(table), -1))
    known, counted = (cells_of(s, messages(s)) for s in (split(table)[0], split(bare)[0]))
    assert counted.shape == known.shape
    computes = [c.computes for c in known.columns]
    mine = np.isin(known.column, np.flatnonzero(computes))
    assert (counted.microbatch[mine] == known.microbatch[mine]).all()


def drawn_logs(effects: OpEffects, op: str, stage: int, draws: int = 200) -> Floats:
    """[replicas, microbatches, draws] of one column."""
    factors = np.log(effects._factors(rng(), effects.state(rng(), draws)))
    return factors[:, :, next(k for k, c in enumerate(effects.cells.columns) if (c.op, c.stage) == (op, stage))]


def test_draws_move_passes_and_stages_of_a_microbatch_together_and_replicas_apart(varied: OpEffects) -> None:
    forward, backward, later = (drawn_logs(varied, op, s) for op, s in ((FORWARD, 0), (BACKWARD, 0), (FORWARD, 1)))
    assert np.corrcoef(forward.ravel(), backward.ravel())[0, 1] > 0.98
    assert np.corrcoef(forward.ravel(), later.ravel())[0, 1] > 0.98
    assert abs(np.corrcoef(forward[0].ravel(), forward[1].ravel())[0, 1]) < 0.1
    assert forward.std() == pytest.approx(VARIED.forward, rel=0.05)
    assert backward.std() == pytest.approx(VARIED.backward, rel=0.05)


def test_replicas_with_the_same_microbatches_are_found_and_drawn_together() -> None:
    effects = fit(table_of(replace(VARIED, replicas=8, together=2), STEPS))
    assert effects.parts.together == 2
    loads = drawn_logs(effects, FORWARD, 0)
    assert np.corrcoef(loads[0].ravel(), loads[1].ravel())[0, 1] > 0.98
    assert abs(np.corrcoef(loads[1].ravel(), loads[2].ravel())[0, 1]) < 0.1


def test_balanced_microbatches_stay_balanced() -> None:
    effects = fit(table_of(replace(VARIED, replicas=16, balanced=True, own=0.005), STEPS))
    assert effects.parts.even
    loads = drawn_logs(effects, BACKWARD, 0)
    assert loads.mean(axis=1).std() < 0.25 * loads.std() / np.sqrt(VARIED.microbatches)
    assert not fit(table_of(replace(VARIED, replicas=16), STEPS)).parts.even


# ---- the distribution of step times ----------------------------------------------------------------------------------


def test_without_noise_every_draw_is_the_step_itself() -> None:
    table = table_of(Planted(replicas=2, forward=0, backward=0, own=0, rank=0, step=0, jitter=0), 4)
    effects = fit(table)
    times = effects.times(rng(), 50)
    assert times == pytest.approx(effects.measured[0], rel=1e-9)


def test_draws_keep_the_mean_of_every_operation(varied: OpEffects) -> None:
    drawn = varied.draw(rng(), 4000)
    mean = drawn.draws[drawn.row[3 * varied.cells.op + 1]].mean(axis=1)
    assert mean.mean() == pytest.approx(varied.played.run[varied.cells.op].mean(), rel=0.005)
    assert (mean / varied.cells.gathered(varied.level)).std() < 0.01


def test_draws_run_on_the_program_of_the_replay(varied: OpEffects) -> None:
    drawn = varied.draw(rng(), 64, np.zeros(64, np.int64))
    assert finish_times(varied.played.program, drawn) == pytest.approx(
        varied.times(rng(), 64, np.zeros(64, np.int64)) / varied.bias
    )


def test_lengths_that_vary_are_predicted_and_independent_draws_are_not(varied: OpEffects, truth: Floats) -> None:
    """From 22 steps, against 1,500 more of the same job: spec's joint tuples and its pool sampler."""
    ours = np.sort(varied.times(rng(), 4000))
    iid = np.sort(iid_pool(varied.played, varied.bias).times(rng(), 2000))
    off, iid_off = (wasserstein(x, truth) / truth.mean() for x in (ours, iid))
    assert off < 0.01 and iid_off > 5 * off and iid_off > 0.05
    assert np.quantile(ours, 0.95) == pytest.approx(np.quantile(truth, 0.95), rel=0.015)
    assert np.quantile(iid, 0.95) < 0.95 * np.quantile(truth, 0.95)


def test_a_slow_worker_stays_slow() -> None:
    plan = replace(STEADY, slow=(5, 1.5))
    effects = fit(table_of(plan, STEPS))
    assert list(sizes_of(effects).slow) == [(1, 1)]
    assert sizes_of(effects).slow[1, 1] == pytest.approx(1.5, rel=0.03)
    truth, ours = true_times(plan, 500), effects.times(rng(), 2000)
    assert np.quantile(ours, 0.95) == pytest.approx(np.quantile(truth, 0.95), rel=0.01)
    iid = iid_pool(effects.played).times(rng(), 500)
    assert np.median(iid) < 0.93 * np.median(truth)


def test_a_slow_worker_does_not_hide_among_lengths_that_vary() -> None:
    slow = sizes_of(fit(table_of(replace(VARIED, slow=(5, 1.5)), STEPS))).slow
    assert list(slow) == [(2, 1)] and slow[2, 1] == pytest.approx(1.5, rel=0.05)


def test_replicas_that_differ_by_chance_alone_are_taken_as_alike(varied: OpEffects) -> None:
    """A replica's 176 microbatches of CV 30% average to within 2.4%: that is chance, not the GPU."""
    seconds = varied.cells.spread_out(varied.played.run)
    raw = np.nanmean(seconds, axis=(1, 3))
    kept = varied.level.mean(axis=1)
    assert (raw / raw.mean(axis=0)).std() > 0.015
    assert (kept / kept.mean(axis=0)).std() < 0.75 * (raw / raw.mean(axis=0)).std()


def test_waits_that_hide_in_gaps_are_found() -> None:
    """With no rows of the collective that all replicas wait in, its wait looks like host time of the next operation."""
    table = without(table_of(VARIED, STEPS), "grads-reduce-scatter")
    effects = fit(table, table.steps[::2])
    assert effects.hidden > 0.1
    truth = true_times(VARIED, 500)
    assert np.median(effects.times(rng(), 1000)) == pytest.approx(np.median(truth), rel=0.02)


def test_whole_tables_hide_no_waits(varied: OpEffects) -> None:
    assert varied.hidden == 0.0


# ---- sizes and beliefs ----------------------------------------------------------------------------------------------


def test_planted_sizes_are_found() -> None:
    plan = replace(STEADY, replicas=16, rank=0.02, step=0.01)
    sizes = sizes_of(fit(table_of(plan, 60)))
    rank, step = (sizes.by_name[k].interval for k in ("rank", "step"))
    assert rank is not None and 0.8 * rank.low < 0.02 < 1.2 * rank.high
    assert step is not None and 0.8 * step.low < 0.01 < 1.2 * step.high
    assert sizes.by_name["load"].value == pytest.approx((0.02 + 2 * 0.03) / 3, rel=0.1)
    assert sizes.by_name["own"].value == pytest.approx(np.hypot(0.01, 0.005), rel=0.25)
    assert sizes.stage_correlation > 0.8 and sizes.pass_correlation > 0.8


def test_intervals_cover() -> None:
    """90% intervals of a standard deviation, over made-up samples."""
    from presage_fit.random_effects import sd_estimate

    hits = 0
    for seed in range(300):
        found = sd_estimate(float(rng(seed).standard_normal(12).var(ddof=1)), 11)
        hits += found.low <= 1.0 <= found.high
    assert 0.86 < hits / 300 < 0.94


def test_steps_that_follow_each_other_are_alike(varied: OpEffects) -> None:
    from presage_fit.ops.sizes import _correlation

    common, made = np.zeros(400), rng()
    for k in range(1, 400):
        common[k] = 0.8 * common[k - 1] + made.standard_normal()
    assert _correlation(common, np.arange(400)) == pytest.approx(0.8, abs=0.1)
    assert _correlation(made.standard_normal(400), np.arange(400)) < 0.3
    ids = np.arange(30)
    assert (np.diff(varied.path(rng(), ids, 5, 1.0), axis=1) == 0).all()
    assert np.mean(np.diff(varied.path(rng(), ids, 50, 0.0), axis=1) == 0) < 0.1


def test_beliefs_carry_over(varied: OpEffects) -> None:
    belief = fit(table_of(replace(STEADY, slow=(5, 1.5)), STEPS)).belief()
    noise = belief.noise
    assert noise.slow.share == pytest.approx(1 / 16) and noise.slow.factor.mean == pytest.approx(1.5, rel=0.03)
    assert noise.load.mean == pytest.approx(1.0) and noise.load.sd == pytest.approx(0.027, rel=0.15)
    assert varied.belief().noise.load.sd == pytest.approx(0.31, rel=0.1)
    assert {"spread.products.rank", "spread.products.own", "common.sd", "slow.share"} <= set(belief.intervals)
    assert belief.drawn(rng()).slow.share >= 0
    import tomllib

    assert parse_noise(tomllib.loads(format_noise(belief))).noise.numbers() == pytest.approx(noise.numbers())


# ---- pools and shares ------------------------------------------------------------------------------------------------


def test_a_pool_keeps_rows_where_there_are_enough() -> None:
    effects = 0.3 * rng().standard_normal((2, ENOUGH, 1, 3))
    pool = pool_of(effects)
    assert pool is not None and not pool.normal
    drawn = pool.draw(rng(), 4, 500)
    assert drawn.shape == (2, 4, 3, 500)
    mine = np.exp(effects[1, :, 0])
    assert np.isin(np.round(drawn[1, :, 0] / drawn[1, :, 0].min(), 6), np.round(mine[:, 0] / mine[:, 0].min(), 6)).all()
    assert drawn.mean(axis=(1, 3)) == pytest.approx(1.0, abs=0.02)


def test_a_small_pool_is_a_normal_with_its_covariance() -> None:
    both = rng().standard_normal((1, 100, 1, 1))
    effects = np.concatenate([0.2 * both, 0.1 * both], axis=3)
    pool = pool_of(effects)
    assert pool is not None and pool.normal
    logs = np.log(pool.draw(rng(), 5, 4000)[0])
    assert logs[:, 0].std() == pytest.approx(0.2, rel=0.15)
    assert np.corrcoef(logs[:, 0].ravel(), logs[:, 1].ravel())[0, 1] > 0.999
    assert len(np.unique(logs[:, 0].round(9))) > 1000


def test_a_pool_of_nothing_is_none() -> None:
    assert pool_of(np.zeros((2, 10, 1, 3))) is None
    assert pool_of(np.full((2, 10, 1, 3), np.nan)) is None


def test_levels_of_pure_chance_are_the_columns_average() -> None:
    seconds = np.exp(0.3 * rng().standard_normal((8, 4, 2, 20)))
    level, channels = levels(seconds)
    assert isinstance(channels, Channels) and channels.weight.sum() == pytest.approx(1)
    assert level.std(axis=(0, 1)).max() < 0.25 * seconds.mean(axis=3).std(axis=(0, 1)).max()
    assert level.mean(axis=(0, 1)) == pytest.approx(seconds.mean(axis=(0, 1, 3)), rel=1e-6)


# ---- tables as they come --------------------------------------------------------------------------------------------


def test_same_seed_same_bytes(varied: OpEffects) -> None:
    assert (varied.times(rng(3), 200) == varied.times(rng(3), 200)).all()
    assert (varied.resampled(rng(3)).times(rng(), 50) == varied.resampled(rng(3)).times(rng(), 50)).all()


def test_only_the_steps_given_are_used() -> None:
    table = table_of(STEADY, 12)
    spoilt = replace(table, duration=np.where(table.step % 2 == 1, 5.0, table.duration))
    one, other = (fit(t, range(0, 12, 2)).times(rng(), 100) for t in (table, spoilt))
    assert (one == other).all()


def test_steps_with_other_operations_are_a_set_of_their_own() -> None:
    table = table_of(STEADY, 12)
    odd = np.flatnonzero((table.step % 3 == 0) & (table.op == table.ops.index("optimizer")) & (table.dp == 0))
    keep = np.delete(np.arange(len(table)), odd)
    mixed = replace(table, **{c: getattr(table, c)[keep] for c in COLUMNS})
    sets = fit_sets(mixed)
    assert [len(s.ids) for s in sets] == [8, 4] and [s.share for s in sets] == pytest.approx([2 / 3, 1 / 3])


def test_one_step_is_not_enough() -> None:
    with pytest.raises(InputError, match="same operations"):
        fit(table_of(STEADY, 1))
    with pytest.raises(InputError, match="none of the steps"):
        steps_only(table_of(STEADY, 2), [99])
