"""Collectives: the laws every platform, op, group and size must keep."""

import math
import timeit
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.collectives import OPS, Collectives, RankGroup, volume
from presage.costs.collectives.curve import Corrections, TimeCurve, rising
from presage.costs.collectives.law import ANY
from presage.costs.collectives.model import CollectiveParameters, shipped_parameters
from presage.errors import PresageError
from presage.hardware import Platform, platform, platforms
from presage_fit.collectives import MeasuredCollective, fit

PLATFORMS = st.sampled_from(platforms())
SIZES = st.floats(1, 1e12)


@st.composite
def places(draw: st.DrawFn) -> tuple[Platform, RankGroup]:
    """A platform and a group that can be on it."""
    here = draw(PLATFORMS)
    near = draw(st.integers(1, here.domain))
    domains = draw(st.integers(1, min(here.links[-1].ranks // here.domain, 5000)))
    ranks = near * domains - (draw(st.integers(0, near - 1)) if domains > 1 else 0)
    return here, RankGroup(max(ranks, 1), min(near, max(ranks, 1)))


@given(places(), st.sampled_from(OPS), SIZES, SIZES)
def test_more_bytes_never_take_less_time(place: tuple[Platform, RankGroup], op: str, one: float, other: float) -> None:
    here, group = place
    model = Collectives.of(here)
    less, more = model.seconds(op, min(one, other), group), model.seconds(op, max(one, other), group)
    assert less <= more * (1 + 1e-12)
    assert (less > 0) == (group.ranks > 1) and math.isfinite(more)


@given(places(), st.sampled_from(OPS))
def test_there_is_no_jump(place: tuple[Platform, RankGroup], op: str) -> None:
    here, group = place
    if group.ranks == 1:
        return
    m = np.geomspace(1, 1e12, 4001)
    near, beside = (Collectives.of(here).seconds(op, x, group) for x in (m, m * (1 + 1e-7)))
    assert np.all(np.abs(np.log(beside / near)) < 1e-5)


@given(places(), st.sampled_from(OPS), SIZES)
def test_no_link_carries_more_than_it_can(place: tuple[Platform, RankGroup], op: str, nbytes: float) -> None:
    here, group = place
    if group.ranks == 1:
        return
    took = Collectives.of(here).seconds(op, nbytes, group)
    inner = here.links[0]
    if group.domains == 1:
        # A rank has to receive so much of what it did not have; where the switch reduces, half of an all-reduce.
        least = volume(op, group.ranks) * nbytes * (0.5 if op == "all_reduce" and inner.in_network else 1)
        assert least / took <= inner.bandwidth * (1 + 1e-9)
    else:
        crossing = nbytes / group.per_domain * (1 - 1 / group.domains) if op != "send_recv" else nbytes
        assert crossing / took <= max(k.bandwidth for k in here.links[1:]) * (1 + 1e-9)


@given(places(), st.sampled_from(OPS), SIZES, st.integers(0, 2), st.floats(1, 10), st.floats(0.1, 1))
def test_a_better_link_is_never_slower(
    place: tuple[Platform, RankGroup], op: str, nbytes: float, tier: int, faster: float, nearer: float
) -> None:
    here, group = place
    at = tier % len(here.links)
    better = replace(
        here.links[at], bandwidth=here.links[at].bandwidth * faster, latency=here.links[at].latency * nearer
    )
    links = (*here.links[:at], better, *here.links[at + 1 :])
    model = Collectives.of(here)
    changed = Collectives(replace(here, links=links), model.fitted)
    assert changed.seconds(op, nbytes, group) <= model.seconds(op, nbytes, group) * (1 + 1e-9)


@given(PLATFORMS, st.sampled_from(OPS), SIZES, st.integers(1, 64), st.data())
def test_more_nodes_are_never_faster(here: Platform, op: str, nbytes: float, nodes: int, data: st.DataObject) -> None:
    if op == "send_recv":  # between two ranks: a network card may well be quicker than one link of a mesh
        return
    near = data.draw(st.integers(1, here.domain))
    more = nodes * data.draw(st.integers(1, 4))
    if more * here.domain > here.links[-1].ranks:
        return
    model = Collectives.of(here)
    few, many = (model.seconds(op, nbytes, RankGroup(k * near, near)) for k in (nodes, more))
    assert few <= many * (1 + 1e-9)


@given(PLATFORMS, st.sampled_from(OPS), SIZES, st.integers(2, 10_000), st.integers(2, 10_000))
def test_more_ranks_are_never_faster(here: Platform, op: str, nbytes: float, one: int, other: int) -> None:
    """From 8 ranks to 10,000; an all-to-all at as many bytes to each peer. Fewer are as they were measured."""
    few, many = (min(n, here.links[-1].ranks) for n in sorted((one, other)))
    if op == "send_recv" or few < min(8, here.domain):
        return
    each = (few, many) if op == "all_to_all" else (1, 1)
    model = Collectives.of(here)
    less, more = (model.seconds(op, nbytes * k, RankGroup.of(here, n)) for k, n in zip(each, (few, many), strict=True))
    assert less <= more * (1 + 1e-9)


LAW = CollectiveParameters({ANY: shipped_parameters().laws[ANY]}, Corrections())


@given(PLATFORMS, st.sampled_from(OPS), SIZES, st.integers(2, 10_000), st.integers(2, 10_000))
def test_the_law_alone_rises_with_ranks(here: Platform, op: str, nbytes: float, one: int, other: int) -> None:
    """From two ranks on, for any platform, where neither tuner nor measurement comes between; cubes and meshes have
    more links among more ranks."""
    few, many = (min(n, here.links[-1].ranks) for n in sorted((one, other)))
    if op == "send_recv" or here.links[0].topology in ("mesh", "cube"):
        return
    unknown = replace(here, key="none", links=(replace(here.links[0], fabric="new"), *here.links[1:]))
    each = (few, many) if op == "all_to_all" else (1, 1)
    model = Collectives(unknown, LAW)
    less, more = (model.seconds(op, nbytes * k, RankGroup.of(here, n)) for k, n in zip(each, (few, many), strict=True))
    assert less <= more * (1 + 1e-9)


def test_a_message_to_every_peer_has_its_price() -> None:
    """All-to-alls of few bytes between nodes: latency once, then a message after another."""
    model = Collectives.of(platform("dgx-h100"))
    few, many = (model.seconds("all_to_all", 64.0 * n, RankGroup(n, 8)) for n in (64, 512))
    assert 1e-6 * 448 <= many - few <= 3e-6 * 448
    efa = Collectives.of(platform("p5")).seconds("all_to_all", 64.0 * 64, RankGroup(64, 8))
    assert 30e-6 < efa - few < 80e-6  # one hop's longer latency, not one for each peer


def test_trees_swap_between_two_nodes_and_send_twice_over_more() -> None:
    model = Collectives.of(platform("p4de"))
    two, four, many = (model.seconds("all_reduce", 2.0**32, RankGroup(8 * n, 8)) for n in (2, 4, 512))
    assert 1.6 < four / two < 2.1 and many / four < 1.2


def test_an_oversubscribed_network_is_a_tier_of_its_own() -> None:
    """Pods of 256 GPUs with a quarter of the bandwidth between them: what stays in a pod takes as long as before."""
    here = platform("dgx-h100")
    pod = replace(here.links[1], name="leaf", ranks=256)
    spine = replace(here.links[1], name="spine", bandwidth=here.links[1].bandwidth / 4)
    thin = Collectives(replace(here, key="thin", links=(here.links[0], pod, spine)), Collectives.of(here).fitted)
    full = Collectives.of(here)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        near, far = RankGroup(256, 8), RankGroup(1024, 8)
        assert thin.seconds(op, 2.0**30, near) == pytest.approx(full.seconds(op, 2.0**30, near))
        assert thin.seconds(op, 2.0**30, far) >= full.seconds(op, 2.0**30, far) * (
            2 if op == "all_to_all" else 1 - 1e-9
        )


def test_networks_that_reduce() -> None:
    """CollNet: as many hops whatever the nodes, and each byte over the cards once."""
    here = platform("dgx-a100")
    sharp = replace(here, key="sharp", links=(here.links[0], replace(here.links[1], in_network=True)))
    plain, reduces = Collectives.of(here), Collectives(sharp, Collectives.of(here).fitted)
    for ranks in (64, 4096):
        group = RankGroup(ranks, 8)
        assert reduces.seconds("all_reduce", 2.0**32, group) < plain.seconds("all_reduce", 2.0**32, group)
    wide, narrow = (reduces.seconds("all_reduce", 2.0**20, RankGroup(n, 8)) for n in (8192, 4096))
    assert wide == pytest.approx(narrow)


def test_ranges_are_wider_where_less_was_measured() -> None:
    model = Collectives.of(platform("dgx-h100"))
    groups = [RankGroup(8, 8), RankGroup(4, 4), RankGroup(16, 8), RankGroup(8192, 8)]
    ranges = [model.time_range("all_reduce", g) for g in groups]
    widths = [r.high / r.low for r in ranges]
    assert widths == sorted(widths) and len(set(widths)) == 4
    other = Collectives.of(platform("mi300x-ib")).time_range("all_reduce", RankGroup(8, 8))
    same = Collectives.of(platform("8xh800")).time_range("all_reduce", RankGroup(8, 8))
    assert same.high < other.high and "nothing measured" in other.basis


def test_a_rack_of_trays_is_one_domain() -> None:
    rack, node = platform("gb200-nvl72"), platform("dgx-h100")
    assert RankGroup.on_nodes(rack, 16, 4) == RankGroup(16, 16)
    assert RankGroup.on_nodes(rack, 144, 36) == RankGroup(144, 72) == RankGroup.on_nodes(rack, 144, 2)
    assert RankGroup.on_nodes(rack, 36, 36) == RankGroup(36, 18)
    assert RankGroup.on_nodes(node, 16, 2) == RankGroup(16, 8) and RankGroup.on_nodes(node, 2, 2) == RankGroup(2, 1)
    assert RankGroup.on_nodes(platform("dgx-2"), 8, 2) == RankGroup(8, 4)


def test_numbers_and_arrays_agree() -> None:
    here = platform("dgx-b200")
    model, m = Collectives.of(here), np.geomspace(1, 1e13, 50)
    for op in OPS:
        for ranks in (2, 8, 64):
            group = RankGroup.of(here, ranks)
            one_by_one = [model.seconds(op, float(x), group) for x in m]
            np.testing.assert_allclose(model.seconds(op, m, group), one_by_one, rtol=1e-12)
            assert model.busbw(op, 1e9, group) == pytest.approx(volume(op, ranks) * 1e9 / model.seconds(op, 1e9, group))


def test_nothing_to_do_costs_nothing() -> None:
    model = Collectives.of(platform("dgx-h100"))
    assert (
        model.seconds("all_reduce", 1e9, RankGroup(1, 1)) == 0 and model.seconds("all_gather", 0, RankGroup(8, 8)) == 0
    )
    assert list(model.seconds("all_reduce", np.array([0.0, 1e6]), RankGroup(8, 8)) > 0) == [False, True]
    assert model.all_to_all_v(np.zeros((8, 8)), RankGroup(8, 8)) == 0


def test_groups_pack_and_are_checked() -> None:
    here = platform("dgx-h100")
    assert (
        RankGroup.of(here, 4) == RankGroup(4, 4)
        and RankGroup.of(here, 20) == RankGroup(20, 8)
        and RankGroup.of(here, 20).domains == 3
    )
    for ranks, near in ((0, 1), (4, 0), (4, 5)):
        with pytest.raises(PresageError, match="no group"):
            RankGroup(ranks, near)
    with pytest.raises(PresageError, match="dgx-h100 has 8 GPUs in a domain, not 16"):
        Collectives.of(here).seconds("all_reduce", 1.0, RankGroup(16, 16))
    with pytest.raises(PresageError, match="4xgv100 has 2 domains, not 4"):
        Collectives.of(platform("4xgv100")).seconds("all_reduce", 1.0, RankGroup(8, 2))
    with pytest.raises(PresageError, match="unknown collective 'gather'"):
        Collectives.of(here).seconds("gather", 1.0, RankGroup(2, 2))


@given(st.sampled_from([(8, 8), (16, 8), (6, 3), (4, 1)]), st.floats(1, 1e9), st.data())
def test_uneven_all_to_alls(sizes: tuple[int, int], each: float, data: st.DataObject) -> None:
    group, n = RankGroup(*sizes), sizes[0]
    model = Collectives.of(platform("dgx-h100"))
    even = np.full((n, n), each)
    flat = model.seconds("all_to_all", each * n, group)
    assert model.all_to_all_v(even, group) == pytest.approx(flat)
    assert model.all_to_all_v(np.full((2, n), each * (n - 1)), group) == pytest.approx(flat)
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    more = even.copy()
    more[i, j] *= data.draw(st.floats(1, 100))
    assert model.all_to_all_v(more, group) >= flat * (1 - 1e-9)
    assert model.all_to_all_v(more, group) == pytest.approx(model.all_to_all_v(more.T, group))
    if i == j:  # what a rank keeps goes over no link
        assert model.all_to_all_v(more, group) == pytest.approx(flat)


def test_uneven_all_to_alls_are_checked() -> None:
    model = Collectives.of(platform("dgx-h100"))
    with pytest.raises(PresageError, match="takes 8 x 8 or 2 x 8 bytes"):
        model.all_to_all_v(np.ones((4, 4)), RankGroup(8, 8))
    with pytest.raises(PresageError, match="none negative"):
        model.all_to_all_v(-np.ones((8, 8)), RankGroup(8, 8))


def test_what_crosses_nodes_weighs_more_than_what_stays() -> None:
    model, group = Collectives.of(platform("dgx-h100")), RankGroup(16, 8)
    near, far = np.zeros((16, 16)), np.zeros((16, 16))
    near[0, 1] = far[0, 9] = 1e9
    assert model.all_to_all_v(far, group) > 3 * model.all_to_all_v(near, group)


def test_measured_platforms_say_so() -> None:
    model = Collectives.of(platform("dgx-h100"))
    assert model.measured("all_reduce", RankGroup(8, 8)) and model.origin("all_reduce", RankGroup(8, 8)) == "measured"
    assert (
        not model.measured("all_reduce", RankGroup(4, 4))
        and model.origin("all_reduce", RankGroup(4, 4)) == "near measured"
    )
    assert model.origin("all_reduce", RankGroup(64, 8)) == "composed"
    assert Collectives.of(platform("mi300x-ib")).origin("all_gather", RankGroup(8, 8)) == "composed"
    assert Collectives.of(platform("p4de")).measured("all_reduce", RankGroup(16, 8))


def test_figures_others_have_published() -> None:
    """Bus bandwidths at 4 GiB that no row of the fit holds: within a fifth."""
    for key, op, ranks, seen in (
        ("4xv100", "all_reduce", 4, 75.7e9),
        ("dgx-1-v100", "all_reduce", 8, 130.4e9),
        ("4xv100", "all_to_all", 4, 56.7e9),
    ):
        here = platform(key)
        assert Collectives.of(here).busbw(op, 2.0**32, RankGroup.of(here, ranks)) == pytest.approx(seen, rel=0.21)


def test_two_ranks_of_a_mesh_have_one_link() -> None:
    model = Collectives.of(platform("mi300x-ib"))
    pair, all_eight = model.busbw("send_recv", 1e9, RankGroup(8, 8)), model.busbw("all_gather", 1e9, RankGroup(8, 8))
    assert pair < 48e9 < 200e9 < all_eight
    assert model.busbw("all_gather", 1e9, RankGroup(2, 2)) < 48e9


def test_curves_rise_through_what_falls() -> None:
    assert rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert rising(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]
    curve = TimeCurve.through(np.array([8.0, 64.0]), np.array([1.0, 2.0]))
    assert (curve.at(0.5), curve.at(8), curve.at(64), curve.at(128)) == pytest.approx((1.0, 1.0, 2.0, 4.0))
    assert curve.at(8**0.5 * 64**0.5) == pytest.approx(2**0.5)
    assert curve.at_least(0.1).at(64) == pytest.approx(6.4)


def test_a_fit_finds_what_made_its_rows() -> None:
    """Rows made by the shipped model come back from a fit on every other size."""
    here = platform("dgx-h100")
    model = Collectives.of(here)
    m = 2.0 ** np.arange(9, 30)
    rows = [
        MeasuredCollective(here, op, RankGroup(n, n), float(x), model.seconds(op, float(x), RankGroup(n, n)))
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for n in (2, 8)
        for x in m
    ]
    found = Collectives(here, fit(rows[::2]))
    errors = [abs(found.seconds(r.op, r.nbytes, r.group) / r.seconds - 1) for r in rows[1::2]]
    assert np.mean(errors) < 0.03


def test_answers_are_quick() -> None:
    """Below a job search's budget of 20 us, on any machine."""
    model, group = Collectives.of(platform("dgx-h100")), RankGroup(8, 8)
    model.seconds("all_reduce", 1.0, group)
    assert (
        min(timeit.repeat(lambda: model.seconds("all_reduce", 1e6, group), number=1000, repeat=5, timer=process_time))
        < 20e-3
    )
