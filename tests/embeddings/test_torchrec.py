"""presage as the estimator of TorchRec's planner. Needs torchrec and fbgemm-gpu-cpu: the extra `torchrec`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu", reason="needs the extra 'torchrec' (torchrec and fbgemm-gpu-cpu)")
pytest.importorskip("torchrec", reason="needs the extra 'torchrec' (torchrec and fbgemm-gpu-cpu)")

from presage.adapters.torchrec import PresageEstimator
from presage.embeddings import Reuse, Table
from presage.embeddings.sharding_cost import ShardCosts, sharding_cost
from presage.embeddings.sharding_plan import (
    COLUMN,
    DATA,
    KINDS,
    ROW,
    TABLE,
    ShardingPlan,
    ShardingProblem,
    TablePlacement,
)
from presage.hardware import platform

RANKS, BATCH = 4, 2048
ROWS = [2_000_000, 1_000_000, 500_000, 50_000, 10_000, 800_000, 3_000_000, 200_000]
POOLING = [5.0, 20.0, 60.0, 1.0, 40.0, 10.0, 30.0, 2.0]


def _tables() -> tuple[Table, ...]:
    pairs = zip(ROWS, POOLING, strict=True)
    return tuple(Table(f"t{i}", r, 64 << (i % 2), p, Reuse(alpha=1.0)) for i, (r, p) in enumerate(pairs))


def _planned(estimator_of: Any, kinds: list[str]) -> tuple[Any, Any]:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = _tables()
    import torch

    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"])
            for t in tables
        ],
    )
    topology = Topology(world_size=RANKS, compute_device="cuda", hbm_cap=80 * 1024**3)
    limits = {
        t.name: ParameterConstraints(
            sharding_types=kinds, pooling_factors=[t.pooling], compute_kernels=["fused", "dense"]
        )
        for t in tables
    }
    estimator = estimator_of(topology, limits)
    both = [estimator, EmbeddingStorageEstimator(topology, limits)]
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=both)
    planner = EmbeddingShardingPlanner(topology, BATCH, enumerator=enumerator, constraints=limits, debug=False)
    plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    return plan, planner


def _as_plan(found: Any) -> ShardingPlan:
    """TorchRec's plan as ours."""
    (by_name,) = found.plan.values()
    placed = []
    for t in _tables():
        kind, ranks = by_name[t.name].sharding_type, tuple(by_name[t.name].ranks)
        placed.append(TablePlacement(kind, ranks if kind in (TABLE, COLUMN) else ()))
    return ShardingPlan(RANKS, tuple(placed))


def _presage(topology: Any, limits: Any) -> Any:
    return PresageEstimator(topology, limits, platform="dgx-h200", tables={t.name: t for t in _tables()})


def test_the_planner_takes_presages_times() -> None:
    found, _ = _planned(_presage, list(KINDS))
    assert {p.sharding for p in _as_plan(found).tables} <= set(KINDS)


def test_plans_by_presages_times_are_no_worse_than_by_torchrecs_own() -> None:
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator

    problem = ShardingProblem(_tables(), BATCH * RANKS, RANKS, platform("dgx-h200"))
    prices = ShardCosts(problem)
    ours, theirs = (_as_plan(_planned(e, ["table_wise"])[0]) for e in (_presage, EmbeddingPerfEstimator))
    assert sharding_cost(ours, prices).seconds <= sharding_cost(theirs, prices).seconds * 1.001


def test_a_shard_costs_what_the_embedding_model_says_it_adds() -> None:
    from types import SimpleNamespace

    import torch
    from torchrec.distributed.planner.types import Shard

    estimator = PresageEstimator(SimpleNamespace(world_size=RANKS, local_world_size=RANKS), platform="dgx-h200")
    one = SimpleNamespace(
        name="t", tensor=torch.empty(100_000, 64, device="meta"), input_lengths=[10.0], batch_size=BATCH,
        sharding_type=TABLE, shards=[Shard([100_000, 64], [0, 0])],
    )  # fmt: skip
    half = SimpleNamespace(
        **{**vars(one), "sharding_type": COLUMN, "shards": [Shard([100_000, 32], [0, 32 * k]) for k in (0, 1)]}
    )
    rows = SimpleNamespace(
        **{**vars(one), "sharding_type": ROW, "shards": [Shard([25_000, 64], [25_000 * k, 0]) for k in range(4)]}
    )
    all_ = SimpleNamespace(
        **{**vars(one), "sharding_type": DATA, "shards": [Shard([100_000, 64], [0, 0]) for _ in range(4)]}
    )
    for option in (one, half, rows, all_):
        estimator.estimate([option])
    perf = one.shards[0].perf
    table = Table("t", 100_000, 64, 10.0)
    assert 0 < perf.fwd_compute < 1.2e3 * estimator.model.forward([table], BATCH * RANKS)
    assert 0 < perf.bwd_compute < 1.2e3 * estimator.model.backward([table], BATCH * RANKS)
    assert half.shards[0].perf.fwd_comms == pytest.approx(perf.fwd_comms / 2, rel=0.01)
    assert rows.shards[0].perf.fwd_compute < perf.fwd_compute
    assert all_.shards[0].perf.bwd_comms > 0 == all_.shards[0].perf.fwd_comms
