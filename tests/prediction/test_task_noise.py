"""Noise of single tasks: closed forms on small programs, and zero noise equals the deterministic answer."""

import numpy as np
import pytest

from presage.engine import Edges, Lane, Program
from presage.errors import PresageError
from presage.noise.distribution import Fixed, Normal
from presage.noise.model import CLASSES, NO_NOISE, NetworkRegimes, NoiseModel, SlowGpus, WorkSpread
from presage.noise.work_classes import family_class, kernel_class, transfer_class
from presage.prediction.draws.task_noise import TaskClasses, draw_tasks

GEMM, SEND = CLASSES.index("products"), CLASSES.index("dp")


def ranks(count: int, alike: int = 1, across: bool = False) -> TaskClasses:
    """Two steps of so many ranks: a GEMM of 1 s each, then an all-reduce of 0.5 s of all."""
    lanes = [Lane("stream", r) for r in range(count)]
    lane = np.repeat(np.arange(count), 4)
    kind = np.tile([GEMM, SEND, GEMM, SEND], count)
    group = np.tile([-1, 0, -1, 1], count)
    step = np.tile([0, 0, 1, 1], count).astype(np.int32)
    program = Program.of(lanes, lane, Edges.of([], []), group=group)
    seconds = np.where(kind == GEMM, 1.0, 0.5)
    return TaskClasses(program, seconds, kind, lane.astype(np.int64), (alike,) * count, step, group, across)


def test_no_noise_is_the_deterministic_step() -> None:
    found = draw_tasks(ranks(4), NO_NOISE, 0, 50)
    assert np.ptp(found.seconds) == 0 and found.seconds[0, 0] == pytest.approx(1.5) and found.quiet == 1.5


def test_a_step_waits_for_its_slowest_rank() -> None:
    """E[max of n] of 1% normals; one rank that stands for n is as slow as n of them."""
    noise = NoiseModel({"products": WorkSpread(rank=0.01)})
    several = draw_tasks(ranks(16), noise, 0, 8_000).seconds.mean()
    folded = draw_tasks(ranks(1, alike=16), noise, 0, 8_000).seconds.mean()
    assert several == pytest.approx(1.5 + 1.766 * 0.01, abs=0.001) and folded == pytest.approx(several, abs=0.001)


def test_ranks_stay_slow_and_steps_differ() -> None:
    rank = draw_tasks(ranks(1), NoiseModel({"products": WorkSpread(rank=0.05)}), 0, 4_000).seconds
    step = draw_tasks(ranks(1), NoiseModel({"products": WorkSpread(step=0.05)}), 0, 4_000).seconds
    assert np.corrcoef(rank.T)[0, 1] == pytest.approx(1.0) and abs(np.corrcoef(step.T)[0, 1]) < 0.06


def test_a_collective_takes_as_long_for_all_its_members() -> None:
    """One draw for all 16 members: the mean does not grow with them, as it would if each had its own."""
    found = draw_tasks(ranks(16), NoiseModel({"dp": WorkSpread(own=0.1)}), 0, 6_000).seconds
    assert found.mean() == pytest.approx(1 + 0.5 * np.exp(0.005), abs=0.003)


def test_slow_gpus_and_a_congested_network() -> None:
    slow = draw_tasks(ranks(1), NoiseModel(slow=SlowGpus(0.25, Fixed(2.0))), 0, 4_000).seconds
    assert (slow > 2).mean() == pytest.approx(0.25, abs=0.02) and slow.max() == pytest.approx(2.5)
    network = NoiseModel(network=NetworkRegimes((1.0, 3.0), ((0.5, 0.5), (0.5, 0.5))))
    assert np.ptp(draw_tasks(ranks(2), network, 0, 400).seconds) == 0  # one node
    assert draw_tasks(ranks(2, across=True), network, 0, 400).seconds.max() == pytest.approx(2.5)


def test_loads_of_microbatches_are_refused() -> None:
    with pytest.raises(PresageError, match="microbatches"):
        draw_tasks(ranks(1), NoiseModel(load=Normal(1.0, 0.2)), 0, 10)


def test_classes_by_name() -> None:
    assert kernel_class("nvjet_hsh_192x192_64x4") == "products" and family_class("normalisation") == "streams"
    assert transfer_class("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP") == "tp"
    assert transfer_class("all_gather", "CONTEXT_PARALLEL_GROUP") == "cp"
    assert transfer_class("all_reduce", "EXPERT_MODEL_PARALLEL_GROUP") == "ep"
    assert transfer_class("reduce_scatter", "DATA_PARALLEL_GROUP") == "sharding"
    assert transfer_class("all_reduce") == "dp" and transfer_class("SendRecv") == "send"
