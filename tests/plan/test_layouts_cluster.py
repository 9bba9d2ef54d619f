"""The search on a Ray cluster, a real one of this machine: the same plans in the same order, whatever dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from presage.errors import PresageError
from presage.hardware import platform
from presage.jobs.frameworks import framework
from presage.jobs.job import Job
from presage.jobs.presets import preset
from presage.plan.layouts import layout_of, parse_keep, search
from presage.plan.layouts.cluster import ray_cluster

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'presage[ray]'")
KEEP = parse_keep(["cp=1", "virtual=1", "virtual=2", "recompute=none", "recompute=full"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def job() -> Job:
    place = platform("dgx-h100")
    software = framework("megatron-core", place.gpu)
    return Job(preset("llama3.1-8b"), place, 16, 8192, 1, 32, overlap=software.overlap, framework=software)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_finds_the_same_in_the_same_order() -> None:
    here, there = search(job(), 16, keep=KEEP), search(job(), 16, keep=KEEP, ray="auto")
    assert [(layout_of(p.job), p.seconds) for p in there.best] == [(layout_of(p.job), p.seconds) for p in here.best]
    assert there.front == here.front and there.by_knob == here.by_knob
    assert there.counts == here.counts


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_dies_loses_no_work(tmp_path: Path) -> None:
    def dies_once(item: int) -> int:
        """Kills the worker it runs in when it first gets some of the items."""
        mark = tmp_path / str(item)
        if item % 7 == 3 and not mark.exists():
            mark.touch()
            os._exit(1)
        return item * item

    with ray_cluster("auto") as pool:
        assert list(pool.map(dies_once, range(20))) == [i * i for i in range(20)]
    assert len(list(tmp_path.iterdir())) == 3  # three workers did die


@pytest.mark.usefixtures("cluster")
def test_an_error_on_the_cluster_is_the_error_it_is_here() -> None:
    def fails(_: int) -> int:
        raise PresageError("this plan cannot be priced")

    with ray_cluster("auto") as pool, pytest.raises(PresageError, match="cannot be priced"):
        list(pool.map(fails, [1]))
    assert ray.is_initialized()  # a cluster that was there before stays


def test_no_cluster_is_told() -> None:
    if ray.is_initialized():
        ray.shutdown()
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(PresageError, match=f"no Ray cluster at '{address}'"), ray_cluster(address):
            pass
