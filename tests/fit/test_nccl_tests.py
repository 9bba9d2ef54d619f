"""Output of nccl-tests as a platform file: read, used before all else, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from presage.costs.collectives import Collectives, RankGroup
from presage.errors import InputError, PresageError
from presage.hardware import platform
from presage_fit.nccl_tests import measured_platform, read_nccl_tests, write_platform

SIZES = [2.0**k for k in range(10, 31)]


def log(
    path: Path, op: str = "all_reduce", hosts: int = 2, gpus: int = 8, factor: float = 1.0, said: bool = True
) -> Path:
    """A log as nccl-tests writes it, with times `factor` times those that presage predicts."""
    n = hosts * gpus
    model, group = Collectives.of(platform("dgx-h100")), RankGroup(n, gpus)
    lines = [f"# Collective test starting: {op}_perf"] if said else []
    lines += ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 2(factor)", "#", "# Using devices"]
    lines += [
        f"#  Rank {r:2} Group  0 Pid 4242 on node-{r // gpus} device  {r % gpus} [0x1a] NVIDIA H100 80GB HBM3"
        for r in range(n)
    ]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong     time"]
    for m in SIZES:
        t = model.seconds(op, m, group) * factor * 1e6
        alg = m / t / 1e3
        lines.append(
            f"{m:12.0f} {m / 4:12.0f}  float  sum  -1  {t:9.3f} {alg:7.4f} {alg * 1.875:7.4f}  0  {t:9.3f} 0.00 0.00  0"
        )
    path.write_text("\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0"]))
    return path


def test_a_measured_curve_comes_before_what_ships(tmp_path: Path) -> None:
    found = measured_platform([log(tmp_path / "a.log", factor=1.5)], "dgx-h100")
    write_platform(found, tmp_path / "mine.toml")
    here, group = platform(str(tmp_path / "mine.toml")), RankGroup(16, 8)
    before, after = (Collectives.of(p).seconds("all_reduce", np.array(SIZES), group) for p in (found.base, here))
    assert after / before == pytest.approx(1.5, rel=0.05)
    assert Collectives.of(here).origin("all_reduce", group) == "measured"
    assert found.errors() == [pytest.approx(1 / 3, abs=0.01)]
    more = Collectives.of(here).seconds("all_reduce", 2.0**28, RankGroup(64, 8))  # leans on what was measured
    assert more > 1.3 * Collectives.of(found.base).seconds("all_reduce", 2.0**28, RankGroup(64, 8))
    gathered = (Collectives.of(p).seconds("all_gather", 2.0**28, group) for p in (found.base, here))
    assert next(gathered) == pytest.approx(next(gathered), rel=0.25)  # other ops keep their own


def test_a_measured_curve_scales_to_other_nodes_and_to_groups_of_one_rank_a_node(tmp_path: Path) -> None:
    found = measured_platform([log(tmp_path / "a.log", hosts=4, factor=1.5)], "dgx-h100")
    write_platform(found, tmp_path / "mine.toml")
    own, ships = Collectives.of(platform(str(tmp_path / "mine.toml"))), Collectives.of(found.base)
    for group in (RankGroup(16, 8), RankGroup(1024, 8), RankGroup(64, 1), RankGroup(128, 2)):
        nbytes = np.array([2.0**12, 2.0**20, 2.0**27])
        ratio = own.seconds("all_reduce", nbytes, group) / ships.seconds("all_reduce", nbytes, group)
        assert ratio == pytest.approx(1.5, rel=0.15)
        assert own.origin("all_reduce", group) == "near measured"
    for nbytes in (2.0**12, 2.0**27):  # more nodes are never quicker, nor quicker than one
        times = [own.seconds("all_reduce", nbytes, RankGroup(8 * n, 8)) for n in (1, 2, 4, 8, 64, 1000)]
        assert times == sorted(times)


def test_a_rack_of_hosts_is_one_domain(tmp_path: Path) -> None:
    found = measured_platform([log(tmp_path / "a.log", hosts=18, gpus=4)], "gb200-nvl72")
    assert [(c.ranks, c.per_domain) for c in found.curves] == [(72, 72)]


def test_the_collective_is_told_by_the_test_the_file_or_its_bandwidths(tmp_path: Path) -> None:
    assert read_nccl_tests(log(tmp_path / "x.log", "all_gather"))[0].op == "all_gather"
    assert read_nccl_tests(log(tmp_path / "alltoall.log", "all_to_all", said=False))[0].op == "all_to_all"
    (curve,) = read_nccl_tests(log(tmp_path / "y.log", said=False))
    assert (curve.op, curve.ranks, curve.per_domain) == ("all_reduce", 16, 8)
    assert curve.nbytes == tuple(SIZES)
    unclear = log(tmp_path / "z.log", said=False)
    unclear.write_text(unclear.read_text().replace(" sum ", " none "))
    with pytest.raises(InputError, match="does not say which collective it measured: put its name into the file's"):
        read_nccl_tests(unclear)


def test_two_tests_in_one_log_are_two_curves(tmp_path: Path) -> None:
    both = log(tmp_path / "a.log", hosts=1).read_text() + "\n" + log(tmp_path / "b.log", hosts=4).read_text()
    (tmp_path / "all_reduce.log").write_text(both)
    assert [c.ranks for c in read_nccl_tests(tmp_path / "all_reduce.log")] == [8, 32]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "holds no table of nccl-tests"),
        (" 1024 256 float sum -1 12.5 0.1 0.2 0\n", "does not list its ranks"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(InputError, match=message):
        read_nccl_tests(tmp_path / "a.log")


def test_a_platform_that_cannot_have_such_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match="--platform 4xh100 has 4 GPUs in a domain, and the log 8"):
        measured_platform([log(tmp_path / "a.log")], "4xh100")
    found = measured_platform([log(tmp_path / "a.log")], "dgx-h100")
    write_platform(found, tmp_path / "mine.toml")
    with pytest.raises(InputError, match="has all_reduce on 16 ranks already"):
        measured_platform([log(tmp_path / "a.log")], str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks = 16", "ranks = 0", "0 ranks, 8 in a domain, are no group"),
        ('op = "all_reduce"', "op = 3", "collectives.op: should be a text"),
        ("time_us = [", "time_us = [-1, ", "should be as many rising sizes as times"),
        ("ranks_per_domain = 8", "ranks_per_domain = 8\nnodes = 2", "is unknown: choose from op, ranks"),
    ],
)
def test_damaged_curves_are_refused_by_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = measured_platform([log(tmp_path / "a.log")], "dgx-h100").text
    assert old in text.split("[[collectives]]")[1]
    head, tail = text.split("[[collectives]]")
    (tmp_path / "bad.toml").write_text(f"{head}[[collectives]]{tail.replace(old, new)}")
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        platform(str(tmp_path / "bad.toml"))
