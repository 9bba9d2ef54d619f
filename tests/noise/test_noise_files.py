"""Noise files: what is written is read again, and what is wrong is said in one sentence."""

from __future__ import annotations

import pickle
import tomllib
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import InputError, PresageError
from presage.noise.distribution import (
    Distribution,
    Empirical,
    Fixed,
    Gamma,
    Largest,
    LogNormal,
    Mixture,
    Normal,
    Pareto,
    Scaled,
    Spliced,
    Sum,
)
from presage.noise.files import format_noise, parse_noise, read_noise, write_noise
from presage.noise.model import (
    CLASSES,
    Belief,
    CommonNoise,
    CredibleInterval,
    NetworkRegimes,
    NoiseModel,
    ScheduledSlowdown,
    SlowGpus,
    Stalls,
    WorkSpread,
    join_beliefs,
    number,
    specified_paths,
)
from presage_fit.noise import round_belief

above = st.floats(1e-6, 1e6)
share = st.floats(0, 1)
sd = st.floats(0, 10)
signed = st.floats(-1, 1).map(lambda x: x + 0.0)  # -0.0 is 0.0
simple = st.one_of(
    st.builds(Fixed, above),
    st.builds(Normal, above, sd),
    st.builds(LogNormal, above, sd),
    st.builds(Gamma, above, st.floats(0.01, 3)),
    st.builds(Pareto, above, above, st.floats(-0.4, 0.4)),
    st.lists(above, min_size=1, max_size=4).map(lambda v: Empirical(np.array(v))),
)


def deeper(inner: st.SearchStrategy[Distribution]) -> st.SearchStrategy[Distribution]:
    halves = st.tuples(inner, inner).map(lambda two: Mixture(two, (0.25, 0.75)))
    scaled = st.builds(Scaled, inner, above, above)
    return st.one_of(
        halves,
        scaled,
        st.builds(Largest, inner, st.integers(1, 999)),
        st.builds(Spliced, inner, inner, above, st.floats(0, 0.9)),
        st.tuples(inner, inner).map(Sum),
    )


anything = st.recursive(simple, deeper, max_leaves=4)
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
regimes = st.floats(0, 1).map(lambda p: NetworkRegimes((1.0, 3.0), ((1 - p, p), (0.5, 0.5))))
noises = st.builds(
    NoiseModel,
    spread=st.dictionaries(st.sampled_from(CLASSES), st.builds(WorkSpread, sd, sd, sd), max_size=3),
    slow=st.builds(SlowGpus, share, simple),
    load=anything,
    common=st.builds(CommonNoise, sd, signed, signed, sd, sd, anything),
    network=regimes,
    stalls=st.builds(Stalls, sd, anything),
    scheduled=st.lists(st.builds(ScheduledSlowdown, words, simple), max_size=2).map(tuple),
)


@st.composite
def beliefs(draw: st.DrawFn) -> Belief:
    noise = draw(noises)
    paths = draw(st.lists(st.sampled_from(sorted(noise.numbers())), max_size=4, unique=True))
    ends = {p: sorted(draw(st.tuples(share, share))) for p in paths}
    some = st.sampled_from([*noise.numbers(), "common", "spread", "scheduled", "slow.factor"])
    return Belief(
        noise, {p: CredibleInterval(*e) for p, e in ends.items()}, draw(st.dictionaries(some, words, max_size=3))
    )


def plain(value: object) -> object:
    """A noise as text, arrays by their values."""
    with np.printoptions(precision=17, floatmode="unique"):
        return repr(value)


@given(beliefs())
def test_what_is_written_is_read_again(belief: Belief) -> None:
    again = parse_noise(tomllib.loads(format_noise(belief)))
    assert plain(again.noise) == plain(belief.noise)
    assert again.intervals == belief.intervals
    assert again.sources == belief.sources


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    good = Belief(NoiseModel({"products": WorkSpread(0.02)}), {"spread.products.rank": CredibleInterval(0.01, 0.03)})
    write_noise(good, path)
    before = path.read_text()
    with pytest.raises(PresageError, match="nan"):
        write_noise(Belief(NoiseModel({"products": WorkSpread(float("nan"))})), path)
    with pytest.raises(PresageError, match="not a parameter of the noise model"):
        write_noise(Belief(NoiseModel(), {"spread.dp.own": CredibleInterval(0, 1)}), path)
    assert path.read_text() == before
    assert read_noise(path).noise == good.noise


def test_numbers_may_stand_alone_and_fixed_ones_are_distributions() -> None:
    found = parse_noise(
        tomllib.loads("[slow]\nshare = 1\nfactor = 1.2\n[common]\njitter_seconds = { fixed = { value = 2 } }")
    )
    assert found.noise.slow == SlowGpus(1.0, Fixed(1.2))
    assert found.noise.common.jitter == Fixed(2.0)


BAD = {
    "x = 1": "x: is unknown",
    "[slow]\nshare = -1": "slow.share: -1 is out of range [0, 1]",
    "[slow]\nshare = 1.5": "slow.share: 1.5 is out of range [0, 1]",
    "[slow]\nfactor = { lognormal = { median = 1 } }": "slow.factor.log_sd: is missing",
    "[slow]\nfactor = { fixed = -1 }": "slow.factor: is a factor of -1",
    "[spread.products]\nrank = -0.1": "spread.products.rank: -0.1 is out of range [0, 10]",
    "[spread.dp]\nown = { value = 1, low = 0 }": "spread.dp.own: needs a value, and low and high or neither",
    "[spread.products]\nrank = { value = 1, low = 2, high = 1 }": "its low, 2, is above its high, 1",
    "[spread.products]\nrank = { value = 1, from = 'x' }": "spread.products.rank.from: is unknown",
    "[spread.products]\nrank = true": "spread.products.rank: is True: it should be a number",
    "[spread.gemm]\nrank = 0.1": "unknown class of work 'gemm'",
    "[load]\nweibull = { shape = 1 }": "load: should be a table of one key",
    "[load]\nmixture = { parts = [], shares = [] }": "load",
    "[load]\nempirical = []": "load: an empirical distribution needs finite values",
    "[load]\nempirical = [{ value = 1, low = 0, high = 2 }]": "load.values.0: measured values stand alone",
    "[load]\nlargest = { base = 1, n = 0.5 }": "load.n: is 0.5: it should be a whole number",
    "[common]\nsd = nan": "common.sd: is nan",
    "[common]\ndrift = inf": "common.drift: is inf",
    "[common]\njitter = 1": "common.jitter: is unknown",
    "[common]\njitter_seconds = 'a'": "common.jitter_seconds: is 'a'",
    "[stalls]\nseconds = { lognormal = { median = 1, log_sd = -1 } }": "stalls.seconds: a LogNormal's log_sd",
    "[network]\nfactors = [1, 2]\nmoves = [[1, 0], [0.5, 0.4]]": "network: network regimes need",
    "[network]\nfactors = 1": "network.factors: is 1: it should be a list",
    "[[scheduled]]\nfactor = 1": "scheduled.0.name: is missing",
    "[scheduled]\nname = 'a'": "scheduled",
    "sources = 3": "sources: is 3: it should be a table",
    "[sources]\na = 3": "sources.a: is 3: it should be text",
    "spread = 2": "spread: is 2: it should be a table",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_gets_one_sentence_with_its_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError) as e:
        read_noise(path)
    assert str(e.value).startswith(f"{path}: ")
    assert BAD[text] in str(e.value)
    assert "\n" not in str(e.value)


def test_no_toml_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[")
    with pytest.raises(InputError, match="not valid TOML"):
        read_noise(tmp_path / "a.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_noise(tmp_path / "none.toml")


def test_what_the_later_belief_says_goes_over_the_first() -> None:
    first = Belief(
        NoiseModel(
            {"products": WorkSpread(0.02, own=0.01)}, SlowGpus(0.1, LogNormal(1.2, 0.1)), common=CommonNoise(0.01, 0.6)
        ),
        {"spread.products.rank": CredibleInterval(0.01, 0.03), "slow.factor.median": CredibleInterval(1.1, 1.3)},
        {"spread.products.rank": "old", "common": "old"},
    )
    later = Belief(
        NoiseModel({"products": WorkSpread(0.05), "dp": WorkSpread(own=0.1)}, SlowGpus(factor=Fixed(2.0))),
        {"spread.products.rank": CredibleInterval(0.04, 0.06), "common.sd": CredibleInterval(0.0, 0.001)},
        {"spread": "new"},
    )
    both = join_beliefs(first, later)
    assert both.noise.of("products") == WorkSpread(0.05, own=0.01)
    assert both.noise.of("dp") == WorkSpread(own=0.1)
    assert both.noise.slow == SlowGpus(0.1, Fixed(2.0))
    assert both.noise.common == CommonNoise(0.0, 0.6), "a 0 with a range was found, and is no silence"
    assert both.intervals["spread.products.rank"] == CredibleInterval(0.04, 0.06)
    assert "slow.factor.median" not in both.intervals
    assert both.sources == {"common": "old", "spread": "new"}
    nothing = join_beliefs(first, Belief(NoiseModel()))
    assert nothing == first
    assert join_beliefs(Belief(NoiseModel()), first).noise == first.noise


@given(beliefs())
def test_rounding_changes_no_number_by_much_and_says_the_same(belief: Belief) -> None:
    short = round_belief(belief)
    numbers = belief.noise.numbers()
    assert all(v == pytest.approx(numbers[p], rel=1e-3) for p, v in short.noise.numbers().items())
    assert specified_paths(short) <= specified_paths(belief)
    for path in specified_paths(belief) - specified_paths(short):  # as good as usual, and now as usual
        assert "." not in path or attrgetter(path)(short.noise) == attrgetter(path)(NoiseModel()), path
    format_noise(short)


@dataclass(frozen=True)
class _Checkpoints:
    share: float = number(limits=(0.0, 1.0))
    weight: float = number(limits=(0.0, 5.0))
    seconds: Distribution = Fixed(0.0)


@dataclass(frozen=True)
class _Extended(NoiseModel):
    checkpoints: _Checkpoints = _Checkpoints()


def test_a_new_source_is_read_written_and_joined_by_its_declaration() -> None:
    text = "[checkpoints]\nshare = { value = 0.1, low = 0.05, high = 0.2 }\nseconds = { fixed = 2.0 }\n"
    first = parse_noise(tomllib.loads(text), model=_Extended)
    assert first.noise == _Extended(checkpoints=_Checkpoints(0.1, seconds=Fixed(2.0)))
    assert parse_noise(tomllib.loads(format_noise(first)), model=_Extended) == first
    later = Belief(_Extended(checkpoints=_Checkpoints(weight=3.0), stalls=Stalls(0.1)))
    assert specified_paths(later) == {"checkpoints.weight", "stalls.per_node_hour"}
    both = join_beliefs(first, later)
    assert both.noise.numbers()["checkpoints.weight"] == 3.0 and both.noise.numbers()["checkpoints.share"] == 0.1
    assert both.intervals == first.intervals and pickle.loads(pickle.dumps(both.noise)) == both.noise


def test_numbers_of_a_new_source_keep_to_their_limits() -> None:
    with pytest.raises(InputError, match=r"checkpoints.weight: 6 is out of range \[0, 5\]"):
        parse_noise({"checkpoints": {"weight": 6}}, model=_Extended)
