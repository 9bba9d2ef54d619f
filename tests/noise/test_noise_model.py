"""The noise model as a value: its numbers, its regimes, what is believed of it."""

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.distribution import LogNormal
from presage.noise.model import (
    NO_NOISE,
    Belief,
    CredibleInterval,
    NetworkRegimes,
    NoiseModel,
    SlowGpus,
    Stalls,
    WorkSpread,
)
from presage.noise.sampling import RandomStreams

SOME = NoiseModel(
    {"products": WorkSpread(0.02, 0.003, 0.01)},
    slow=SlowGpus(0.003, LogNormal(1.1, 0.02)),
    network=NetworkRegimes((1.0, 3.0), ((0.95, 0.05), (0.4, 0.6))),
    stalls=Stalls(0.01, LogNormal(2.0, 1.0)),
)


def test_every_number_can_be_changed_by_its_path() -> None:
    for path, value in SOME.numbers().items():
        if not path.startswith("network"):  # its moves must add up to 1
            assert SOME.changed({path: value * 0.5}).numbers()[path] == value * 0.5
    other = SOME.changed({"spread.products.rank": 0.0, "slow.share": 0.5})
    assert other.of("products").rank == 0.0 and other.slow.share == 0.5
    assert other.of("products").own == 0.01 and other.stalls == SOME.stalls


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(PresageError, match=r"spread\.products\.rnk"):
        SOME.changed({"spread.products.rnk": 0.1})


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(PresageError, match="gemm"):
        NoiseModel({"gemm": WorkSpread(0.1)})


def test_regimes_stay_and_change_as_said() -> None:
    r = SOME.network
    assert np.allclose(r.shares, [8 / 9, 1 / 9])
    path = r.path(np.random.default_rng(0), 2_000, 50)
    assert (path == 1).mean() == pytest.approx(1 / 9, abs=0.01)
    stayed = (path[1:] == 1)[path[:-1] == 1].mean()
    assert stayed == pytest.approx(0.6, abs=0.02)


def test_regimes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(PresageError, match="add up to 1"):
        NetworkRegimes((1.0, 2.0), ((0.9, 0.2), (0.5, 0.5)))


def test_drawn_numbers_fill_their_intervals() -> None:
    belief = Belief(
        SOME, {"spread.products.rank": CredibleInterval(0.01, 0.04), "slow.share": CredibleInterval(0.0, 0.006)}
    )
    rng = np.random.default_rng(0)
    drawn = [belief.drawn(rng) for _ in range(2_000)]
    rank = np.array([n.of("products").rank for n in drawn])
    assert np.allclose(np.quantile(rank, [0.05, 0.5, 0.95]), [0.01, 0.02, 0.04], rtol=0.08)
    share = np.array([n.slow.share for n in drawn])
    assert share.min() >= 0 and np.quantile(share, 0.95) == pytest.approx(0.006, rel=0.1)


def test_streams_do_not_disturb_each_other() -> None:
    a = RandomStreams(5)("gpus").random(4)
    assert (a == RandomStreams(5)("gpus").random(4)).all()
    assert not (a == RandomStreams(5)("own").random(4)).any()
    assert not (a == RandomStreams(5).child(1)("gpus").random(4)).any()
    assert not (a == RandomStreams(6)("gpus").random(4)).any()


def test_no_noise_has_no_spread() -> None:
    numbers = NO_NOISE.numbers()
    assert all(v in (0.0, 1.0) for v in numbers.values())
