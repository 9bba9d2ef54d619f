"""What is believed of a job's steps with no data of it."""

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.model import Belief
from presage.noise.priors import architecture_of, known_systems, machine_of, prior, step_prior
from presage_fit.series.model import believed_records, steps_of


def test_no_data_prior() -> None:
    short, long = (step_prior("Hopper", 64, s) for s in (5.0, 50.0))
    assert isinstance(short, Belief) and set(short.intervals) <= set(short.noise.numbers())
    rng = np.random.default_rng(0)
    spread = [np.quantile(x, 0.95) / np.median(x) for x in
              (steps_of(b.noise, s, 64, 500, rng, 20) for b, s in ((short, 5.0), (long, 50.0)))]  # fmt: skip
    assert spread[0] > spread[1] > 1  # additive jitter: longer steps vary less
    assert step_prior("Blackwell", 64, 5.0).noise.common.drift > short.noise.common.drift
    without = step_prior("Hopper", 64, 5.0, ["NVIDIA/eos"])
    assert without.noise.numbers() != short.noise.numbers()
    assert believed_records(short, 5.0, 64, (4, 3, 30), rng).shape == (4, 3, 30)
    with pytest.raises(PresageError, match="known system"):
        step_prior("Hopper", 64, 5.0, systems=[])


def lost(belief: Belief, nodes: float, seconds: float) -> float:
    stalls = belief.noise.stalls
    return stalls.per_step(nodes, seconds) * stalls.seconds.mean / seconds


def test_stalls_take_the_share_of_time_they_were_seen_to_take() -> None:
    seen = sum(s.lost_seconds for s in known_systems()) / sum(3600 * s.hours for s in known_systems())
    assert 0.001 < seen < 0.004
    for nodes, seconds in ((64, 5.0), (320, 50.0), (2048, 5.0), (32_768, 20.0)):
        belief = step_prior("Hopper", nodes, seconds)
        assert lost(belief, nodes, seconds) == pytest.approx(seen, rel=1e-6)
        assert {p for p in belief.intervals if p.startswith("stalls")} == {"stalls.per_node_hour"}
        often = belief.intervals["stalls.per_node_hour"].high / belief.noise.stalls.per_node_hour
        assert lost(belief, nodes, seconds) * often < 0.025
        assert 1 < belief.noise.stalls.seconds.quantile(0.5) < 10
    few = step_prior("Hopper", 1, 5.0)
    assert lost(few, 1, 5.0) == pytest.approx(seen / 64, rel=1e-6)


def test_what_is_believed_of_a_large_job_is_sane() -> None:
    """16,384 GPUs, steps of 5 s: the 95% quantile is some percent above the median in nine systems of ten."""
    drawn = believed_records(step_prior("Hopper", 2048, 5.0), 5.0, 2048, (200, 1, 300), np.random.default_rng(0))[:, 0]
    above = np.quantile(drawn, 0.95, axis=1) / np.median(drawn, axis=1) - 1
    assert np.quantile(above, 0.95) < 0.08 and np.median(above) < 0.02
    spread = np.mean(drawn, axis=1) / np.median(drawn, axis=1) - 1
    assert np.quantile(spread, 0.95) < 0.03


def test_production_stalls_more_than_screened_nodes() -> None:
    told = [prior("H100", 16_384, step_seconds=5.0, conditions=c) for c in ("screened", "production")]
    shares = [lost(b, 2048, 5.0) for b in told]
    assert shares[1] == pytest.approx(2 * shares[0], rel=1e-6)
    wide = [b.intervals["stalls.per_node_hour"] for b in told]
    assert wide[1].high / wide[1].low > wide[0].high / wide[0].low


def test_names_of_chips_and_machines() -> None:
    chips = {
        "NVIDIA Blackwell GPU (GB200)": "Blackwell",
        "NVIDIA H200-SXM5-141GB": "Hopper",
        "MI300X": "CDNA",
        "T": "T",
    }
    assert {x: architecture_of(x) for x in chips} == chips
    assert machine_of("NVIDIA", "eos-dfw_n64_ngc25.01_nemo") == machine_of("NVIDIA", "eos-dfw_n1024_x") == "NVIDIA/eos"
    assert len({s.machine for s in known_systems()}) == 4
