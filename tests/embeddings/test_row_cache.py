"""Tables in the host's memory with a cache of hot rows in the GPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from presage.costs.lookups.row_reuse import missed_rows, zipf
from presage.embeddings import Reuse, Table
from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import dlrm_ranks, predict_dlrm
from presage.embeddings.dlrm_system import FRAMEWORKS, dlrm_system
from presage.embeddings.sharding_plan import ROW, ShardingPlan, TablePlacement
from presage.errors import PresageError

TABLES = tuple(Table(f"t{i}", 4_000_000, 128, 20.0, Reuse(alpha=0.6)) for i in range(4))
JOB = DlrmJob("cached", TABLES, 65536, 4, "dgx-h200", bottom=(512, 128), top=(512, 1))
PLAN = ShardingPlan.table_wise(4, [0, 1, 2, 3])


def _with(**options: object) -> DlrmJob:
    return replace(JOB, system=replace(FRAMEWORKS["torchrec"], **options))  # type: ignore[arg-type]


def test_a_cache_of_all_rows_misses_none_and_of_none_all() -> None:
    for alpha in (0.0, 0.8, 1.2):
        distinct = zipf(alpha, 1_000_000, 50_000).distinct
        assert missed_rows(alpha, 1_000_000, 50_000, 0) == pytest.approx(distinct, rel=0.01)
        assert missed_rows(alpha, 1_000_000, 50_000, 1_000_000) == 0.0
    even = missed_rows(0.0, 1_000_000, 50_000, 250_000)
    assert even == pytest.approx(0.75 * zipf(0.0, 1_000_000, 50_000).distinct, rel=0.01)


def test_hot_rows_are_where_the_lookups_are() -> None:
    shares = [
        missed_rows(a, 1_000_000, 50_000, 100_000) / missed_rows(a, 1_000_000, 50_000, 0) for a in (0.0, 0.6, 1.0)
    ]
    assert shares[0] > shares[1] > shares[2]


def test_the_smaller_the_cache_the_longer_the_lookups_and_the_less_memory() -> None:
    costs = [dlrm_ranks(_with(cache_load_factor=f), given=PLAN).cost for f in (1.0, 0.5, 0.1)]
    forward = [float(c.load.forward.max()) for c in costs]
    memory = [float(c.load.memory.max()) for c in costs]
    assert forward[0] < forward[1] < forward[2] and memory[0] > memory[1] > memory[2]
    assert costs[0].load.fetch == 0.0
    state, weights = 4, 4 * 128
    missed = missed_rows(0.6, 4_000_000, 20 * 65536, 400_000)
    assert costs[2].load.fetch == pytest.approx(2 * missed * (weights + state) / 64e9, rel=0.01)  # there and back


def test_rows_cut_over_all_ranks_are_fetched_too() -> None:
    plan = ShardingPlan(4, tuple(TablePlacement(ROW) for _ in TABLES))
    costs = [dlrm_ranks(_with(cache_load_factor=f), given=plan).cost for f in (1.0, 0.1)]
    assert costs[1].load.forward.max() > costs[0].load.forward.max()
    assert costs[1].load.memory.max() < costs[0].load.memory.max()


def test_rows_fetched_ahead_hide_behind_the_batch_before() -> None:
    steps = [
        predict_dlrm(dlrm_ranks(_with(cache_load_factor=0.3, prefetch=ahead), given=PLAN), draws=1).step.p50
        for ahead in (False, True)
    ]
    assert steps[1] < steps[0]


def test_a_share_of_rows_is_at_most_one() -> None:
    for share in (0.0, -1.0, 1.5):
        with pytest.raises(PresageError, match="a share of rows, 0 to 1"):
            dlrm_system("torchrec", {"cache_load_factor": share})


def test_a_rank_with_no_memory_left_is_named() -> None:
    full = ShardingPlan.table_wise(4, [0, 2, 2, 2])
    with pytest.raises(PresageError, match=r"GiB more than a rank has for tables: rank 2 is the fullest"):
        dlrm_ranks(replace(JOB, memory=4 * 1024.0**3), given=full)
