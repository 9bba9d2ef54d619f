"""What a step's distribution owes to what: shares that add up, what is hidden, what was planted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from commands import runner
from presage.cli.sensitivity import command
from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.noise.distribution import Fixed, LogNormal
from presage.noise.model import NO_NOISE, CommonNoise, NetworkRegimes, NoiseModel, SlowGpus, Stalls, WorkSpread
from presage.noise.sources import SOURCES, active_sources, only_sources, without_sources
from presage.pool import SERIAL, THREADS_2, processes
from presage.prediction.draws import DrawRequest, draw, draw_all, scale_class, step_model, without_fitted_stragglers
from presage.prediction.draws.sensitivity import Sensitivity, criticality, scale_stage, sensitivity, stage_criticality
from presage.prediction.draws.shapley import shapley
from presage.prediction.draws.step_model import StepModel
from presage.report.sensitivity_answer import notes, plot_sensitivity, sensitivity_answer

JOB = Path(__file__).resolve().parents[2] / "examples" / "jobs" / "hugging_face.toml"
EVERYTHING = NoiseModel(
    spread={
        "products": WorkSpread(rank=0.02, own=0.015),
        "attention": WorkSpread(rank=0.02, own=0.015),
        "ep": WorkSpread(step=0.05),
        "dp": WorkSpread(step=0.05, own=0.05),
    },
    slow=SlowGpus(0.002, Fixed(1.2)),
    load=LogNormal(1.0, 0.02),
    common=CommonNoise(sd=0.005, drift=0.01, run_sd=0.002, jitter=LogNormal(0.01, 1.0)),
    network=NetworkRegimes((1.0, 2.0), ((0.95, 0.05), (0.5, 0.5))),
    stalls=Stalls(0.01, LogNormal(3.0, 1.0)),
)
PLAIN = NoiseModel(
    spread={"products": WorkSpread(rank=0.03), "attention": WorkSpread(rank=0.03)},
    slow=SlowGpus(0.02, Fixed(1.1)),
    common=CommonNoise(sd=0.002),
)


@pytest.fixture(scope="module")
def shape() -> StepModel:
    return step_model(read_transformer_job(JOB))


@pytest.fixture(scope="module")
def found(shape: StepModel) -> Sensitivity:
    return sensitivity(without_fitted_stragglers(shape, PLAIN), PLAIN, 0, 2_000)


# ---- Shapley


def game(some: frozenset[str]) -> np.ndarray:
    """Two that hide each other, one that adds, one that does nothing."""
    return np.array([3.0 * bool(some & {"a", "b"}) + 2.0 * ("c" in some), float(len(some - {"d"}))])


def test_shares_are_the_mean_over_all_orders() -> None:
    names = ["a", "b", "c", "d"]
    expected = np.zeros((4, 2))
    for order in permutations(range(4)):
        some: frozenset[str] = frozenset()
        for i in order:
            expected[i] += (game(some | {names[i]}) - game(some)) / 24
            some |= {names[i]}
    exact = shapley(names, game)
    assert exact.exact and exact.asked == 16
    assert np.allclose(exact.added, expected)
    assert np.allclose(exact.added[:, 0], [1.5, 1.5, 2.0, 0.0])


def test_drawn_orders_agree_with_all_subsets_and_add_up() -> None:
    names = ["a", "b", "c", "d"]
    drawn = shapley(names, game, seed=1, exact=0, pairs=200)
    assert not drawn.exact
    assert np.allclose(drawn.added.sum(axis=0), game(frozenset(names)))
    assert (np.abs(drawn.added - shapley(names, game).added) <= 4 * drawn.error + 1e-9).all()
    assert drawn.error[3].max() == 0 and drawn.added[3, 0] == 0  # what does nothing gets nothing


# ---- sources


def test_every_source_can_be_taken_out_and_all_leave_nothing() -> None:
    assert [s.name for s in active_sources(EVERYTHING)] == [s.name for s in SOURCES]
    assert active_sources(NO_NOISE) == ()
    assert active_sources(without_sources(EVERYTHING, [s.name for s in SOURCES])) == ()
    for s in SOURCES:
        assert [x.name for x in active_sources(only_sources(EVERYTHING, [s.name]))] == [s.name]


def test_a_step_without_all_sources_is_the_step_without_noise(shape: StepModel) -> None:
    steady = without_sources(EVERYTHING, [s.name for s in SOURCES])
    left = draw(shape, steady, 0, 200).seconds
    more = EVERYTHING.common.jitter.mean + (EVERYTHING.load.mean - 1) * shape.pipeline.total
    assert np.ptp(left) < 1e-9
    assert left.flat[0] == pytest.approx(shape.seconds + more, rel=2e-3)


def test_what_is_drawn_together_is_drawn_as_alone(shape: StepModel) -> None:
    """Those whose replicas are the same share them; whoever draws, and in which pieces, changes no number."""
    noises = [only_sources(EVERYTHING, names) for names in (["rank", "stalls"], ["rank"], ["rank", "network", "own"])]
    alone = [draw(shape, noise, 3, 500).seconds for noise in noises]
    asked = [DrawRequest(shape, noise, 500) for noise in noises]
    with processes(2) as pool:
        for way in (SERIAL, THREADS_2, pool):
            found = dict(draw_all(asked, 3, way))
            assert all(np.array_equal(found[i].seconds, seconds) for i, seconds in enumerate(alone))


def test_a_source_less_moves_no_other(shape: StepModel) -> None:
    """Who is slow, and how slow, stays: else differences would be lost in the draws of rare, heavy sources."""
    noise = NoiseModel(
        spread={"products": WorkSpread(rank=0.01, own=0.01)},
        slow=SlowGpus(0.001, LogNormal(2.0, 0.9)),
        stalls=Stalls(0.1, LogNormal(3.0, 1.0)),
    )
    whole = draw(shape, noise, 0, 2_000, 2).seconds
    for name in ("rank", "own"):
        left = draw(shape, without_sources(noise, [name]), 0, 2_000, 2).seconds
        assert np.corrcoef(whole.ravel(), left.ravel())[0, 1] > 0.99, name
    assert np.corrcoef(whole.ravel(), draw(shape, noise, 1, 2_000, 2).seconds.ravel())[0, 1] < 0.5


# ---- sensitivity


def test_shares_add_up_to_the_whole(found: Sensitivity) -> None:
    rows = found.of("source")
    assert {r.name for r in rows} == {"rank", "slow", "common"} and found.exact
    for what in ("variance", "tail", "mean"):
        assert sum(getattr(r.shares, what).value for r in rows) == pytest.approx(1.0)


def test_what_does_not_vary_has_nothing_to_give(found: Sensitivity) -> None:
    for r in found.of("class"):
        if r.name in ("streams", "tp", "ep", "dp", "send", "optimizer", "host"):
            assert r.steady.p95.value == r.steady.p50.value == r.steady.sd.value == 0.0


def test_one_by_one_is_not_all_together(found: Sensitivity) -> None:
    """A slow GPU hides the others' differences, and they part of its slowness."""
    assert found.all_steady.p95.value < 0
    assert abs(found.one_by_one) < 0.8 * abs(found.all_steady.p95.value)
    assert any("where one source no longer delays, another still does" in r for r in notes(found))


def test_quicker_work_is_never_worse(found: Sensitivity) -> None:
    for r in found.rows:
        if r.faster is not None:
            assert r.faster.p95.value <= 3 * r.faster.p95.error + 1e-3 * found.calm, r.name
    products = next(r for r in found.of("class") if r.name == "products")
    assert products.faster is not None and products.faster.p95.value < -0.02 * found.calm


def test_a_planted_cause_is_found(shape: StepModel) -> None:
    noise = NoiseModel(
        spread={"ep": WorkSpread(step=0.6), "products": WorkSpread(rank=0.002)},
        common=CommonNoise(sd=0.0005),
    )
    s = sensitivity(shape, noise, 0, 1_000)
    first = min(s.of("class"), key=lambda r: r.steady.p95.value)
    cause = max(s.of("source"), key=lambda r: r.shares.variance.value if r.shares else 0.0)
    assert first.name == "ep" and cause.name == "step"
    assert cause.shares is not None and cause.shares.variance.value > 0.95
    assert "EP communication" in sensitivity_answer(s).headline


def test_no_noise_has_no_causes(shape: StepModel) -> None:
    s = sensitivity(shape, NO_NOISE, 0, 200)
    assert s.of("source") == () and s.calm == pytest.approx(shape.seconds)
    assert all(r.steady.p95.value == 0 for r in s.rows)
    assert "Variability does not matter" in sensitivity_answer(s).headline
    json.dumps(s.to_json(), allow_nan=False)


def test_the_same_seed_gives_the_same(shape: StepModel) -> None:
    noise = only_sources(PLAIN, ["common", "slow"])
    one, two = (sensitivity(shape, noise, 5, 200).to_json() for _ in range(2))
    assert one == two


# ---- what is on the longest path


def test_hidden_work_is_not_critical(shape: StepModel, found: Sensitivity) -> None:
    c = criticality(shape)
    assert c["host"].share == 0.0 and c["host"].seconds > 0.1  # all of it behind the GPU's work
    assert c["dp"].share < 0.1  # behind the backward pass, but for its last part
    assert c["products"].share > 0.95
    row = next(r for r in found.of("class") if r.name == "host")
    assert row.faster is not None and row.faster.p95.value == 0.0
    assert any("fully overlapped" in r and "host" in r for r in notes(found))


def test_what_hides_nothing_is_critical(shape: StepModel) -> None:
    job = shape.job
    shown = replace(job, overlap=replace(job.overlap, gradients=False, parameters=False))
    c = criticality(step_model(shown))
    assert c["dp"].share == pytest.approx(1.0, abs=0.02)
    assert c["dp"].seconds == pytest.approx(criticality(shape)["dp"].seconds, rel=0.02)


def test_stages_scale_and_the_longest_is_critical(shape: StepModel) -> None:
    busy = shape.pipeline.busy
    shares = [stage_criticality(shape, s).share for s in range(shape.stages)]
    assert int(np.argmax(shares)) == int(np.argmax(busy)) and max(shares) > 0.9
    for s in range(shape.stages):
        assert scale_stage(shape, s, 1.0).seconds == pytest.approx(shape.seconds)
        assert scale_stage(shape, s, 0.9).seconds <= shape.seconds <= scale_stage(shape, s, 1.1).seconds
    slow = scale_stage(shape, 0, 3.0)
    assert draw(slow, NO_NOISE, 0, 10).seconds.flat[0] == pytest.approx(slow.seconds)


def test_a_still_stage_has_no_noise(shape: StepModel) -> None:
    noise = NoiseModel(spread={"products": WorkSpread(rank=0.02, own=0.015)}, slow=SlowGpus(0.002, Fixed(1.2)))
    still = replace(shape, still=frozenset(range(shape.stages)))
    assert np.ptp(draw(still, noise, 0, 200).seconds) < 1e-9
    some = draw(replace(shape, still=frozenset([shape.stages - 1])), noise, 0, 500)
    assert some.mean.value < draw(shape, noise, 0, 500).mean.value


def test_scaled_steps_price_transfers_from_where_they_are(shape: StepModel) -> None:
    quick = scale_class(shape, "products", 0.9)
    assert quick.seconds < shape.seconds
    for kind in quick.curves:
        assert quick.later(kind, np.ones(1))[0] == pytest.approx(0.0, abs=1e-12)
    both = scale_class(scale_class(shape, "products", 0.9), "attention", 0.5)
    assert both.paces.products == 0.9 and both.paces.attention == 0.5 and both.seconds < quick.seconds


# ---- the command


def test_the_command_answers(tmp_path: Path) -> None:
    noise, out, picture = tmp_path / "noise.toml", tmp_path / "out.json", tmp_path / "out.svg"
    noise.write_text("[spread.products]\nrank = 0.03\n[common]\nsd = 0.002\n")
    told = runner(command)(JOB, "--noise", noise, "--draws", "200", "--json", out, "--plot", picture)
    for word in ("Variability costs most in GEMM", "faster first (p95", "Sources of noise", "Pipeline stages"):
        assert word in told
    value = json.loads(out.read_text())
    assert {r["group"] for r in value["rows"]} == {"class", "collective", "source", "stage"}
    assert value["draws"] >= 200 and value["noise"] == str(noise)
    assert picture.read_text().startswith("<?xml") and picture.stat().st_size > 5_000


def test_plots_say_what_they_need(found: Sensitivity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PresageError, match=r"should end in \.svg"):
        plot_sensitivity(found, tmp_path / "plot.txt", 5)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PresageError, match=r"pip install 'presage\[plot\]'"):
        plot_sensitivity(found, tmp_path / "plot.svg", 5)


def test_plots_are_the_same_twice(found: Sensitivity, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot_sensitivity(found, tmp_path / name, 6)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
