"""What real runs of TorchRec sent, against what the job of the same model is predicted to send.

The traces of eight V100s have sizes: 26 tables of MLPerf's sizes and lookups, 16 wide, three on each rank and the two
smallest on all; 16 samples a rank; dense layers 256-128-16 and 512-512-256-1, as the buckets of their gradients say.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.embeddings import Table
from presage.embeddings.dlrm_graph import SPARSE
from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import DlrmRanks, dlrm_ranks, predict_dlrm
from presage.embeddings.sharding_plan import DATA, TABLE, ShardingPlan, TablePlacement
from presage.embeddings.table_files import read_tables
from presage.graph.work import collective
from presage.prediction.rank_program import rank_program
from presage.prediction.rank_results import rank_uses
from presage.prediction.step_program import STREAM

RANKS, SAMPLES, DIM = 8, 16, 16
Sent = tuple[str, int, int]  # what, numbers out, bytes of a number


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def _nodes(folder: Path, rank: int) -> list[dict[str, Any]]:
    return list(_json(folder / f"et_{rank}.json.gz")["nodes"])


def _sent(nodes: list[dict[str, Any]]) -> list[Sent]:
    """Collectives of a rank in order, with what it sends."""
    out = []
    for n in nodes:
        if n["name"] == "record_param_comms" and n["inputs"][3] != "wait" and n["inputs"][0] != n["inputs"][3]:
            tensor = n["inputs"][0][0] if isinstance(n["inputs"][0][0], list) else n["inputs"][0]
            kind = next(x for x in n["inputs"] if isinstance(x, str) and x.startswith("all"))
            out.append((kind.replace("allreduce", "all_reduce").removesuffix("v"), int(tensor[3]), int(tensor[4])))
    return out


def _lookup(nodes: list[dict[str, Any]]) -> tuple[int, int]:
    """Weights that a rank holds, and indices it looks up."""
    (one,) = (n for n in nodes if n["name"].startswith("fbgemm::split_embedding_codegen_lookup"))
    return int(one["input_shapes"][1][0]), int(one["input_shapes"][11][0])


@pytest.fixture(scope="module")
def team(shared: Path) -> DlrmRanks:
    """The job of the traces with the plan that their ranks show: whose weights and lookups add up to a rank's."""
    folder = shared / "traces" / "dlrm_8xv100"
    tables, _ = read_tables(Path(str(files("presage").joinpath("data/dlrm/mlperf_dcnv2.json"))))
    tables = tuple(replace(t, dim=DIM) for t in tables)
    small = sorted(range(26), key=lambda t: tables[t].rows)[:2]
    placed: list[TablePlacement] = [
        TablePlacement(DATA) if t in small else TablePlacement(TABLE, (0,)) for t in range(26)
    ]
    for rank in range(RANKS):
        weights, lookups = _lookup(_nodes(folder, rank))
        fits = [
            three
            for three in itertools.combinations([t for t in range(26) if t not in small], 3)
            if sum(tables[t].rows for t in three) * DIM == weights
            and sum(tables[t].pooling for t in three) * SAMPLES * RANKS == lookups
        ]
        assert len(fits) == 1, f"rank {rank}"
        for t in fits[0]:
            placed[t] = TablePlacement(TABLE, (rank,))
    job = DlrmJob(
        "traced", tables, SAMPLES * RANKS, RANKS, "dgx-1-v100", bottom=(256, 128, DIM), top=(512, 512, 256, 1),
        precision="fp32", index="int32",
    )  # fmt: skip
    return dlrm_ranks(job, given=ShardingPlan(RANKS, tuple(placed)))


def test_every_collective_of_the_trace_is_predicted_to_the_number(team: DlrmRanks, shared: Path) -> None:
    graph = team.team.steps[0].graph
    mine: list[Sent] = []
    for op in graph.ops:
        kind = collective(op)
        if kind is not None:
            tensor = max(graph.inputs_of(op), key=lambda t: t.elements)
            mine.append((kind, tensor.elements, tensor.itemsize))
    for rank in range(RANKS):
        assert Counter(mine) == Counter(_sent(_nodes(shared / "traces" / "dlrm_8xv100", rank)))


def test_collectives_come_in_the_order_of_the_trace(team: DlrmRanks, shared: Path) -> None:
    """But for the sizes, which newer releases send before the forward pass."""
    graph = team.team.steps[0].graph
    ops = [op for op in graph.ops if collective(op) and op.module != f"{SPARSE}sizes"]
    mine = [max(t.elements for t in graph.inputs_of(op)) for op in ops]
    real = [n for _, n, _ in _sent(_nodes(shared / "traces" / "dlrm_8xv100", 0)) if n != 3 * RANKS]
    assert mine == real


def test_what_each_rank_receives_is_predicted(team: DlrmRanks, shared: Path) -> None:
    for rank in range(RANKS):
        _, lookups = _lookup(_nodes(shared / "traces" / "dlrm_8xv100", rank))
        bags = 3 * SAMPLES * RANKS
        assert team.cost.load.indices[rank] == pytest.approx(4 * (lookups + bags))
        assert team.cost.load.output[rank] == SAMPLES * RANKS * 3 * DIM * 4


def test_the_traced_step_is_bound_by_its_host_as_predicted(team: DlrmRanks, shared: Path) -> None:
    """Who is late is the hosts' doing, not the tables': what the slowest rank's lookups add is far below the waits."""
    found = predict_dlrm(team, draws=1)
    assert found.bound == "host"
    assert team.cost.imbalance < 100e-6
    kernels = _collective_kernels(shared / "traces" / "dlrm_8xv100")
    waited = max(max(k) - min(k) for k in zip(*kernels, strict=True))
    assert waited > 1e-3
    transfers = np.array([min(k) for k in zip(*kernels, strict=True)])
    assert transfers.max() < 100e-6  # when the last rank is there, all are small, as predicted
    assert found.many is not None
    assert max(s.seconds for s in found.many.collectives) < 150e-6


def _collective_kernels(folder: Path) -> list[list[float]]:
    """Seconds of each rank's collective kernels, in order."""
    out = []
    for rank in range(RANKS):
        events = _json(folder / f"kineto_{rank}.json.gz")["traceEvents"]
        some = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"]]
        out.append([e["dur"] * 1e-6 for e in sorted(some, key=lambda e: e["ts"])][-8:])
    return out


@pytest.mark.parametrize("run", ["long_a2a_optimizer_5", "long_a2a_optimizer_2_run2"])
def test_steps_of_the_pipelined_runs_have_the_collectives_of_a_job(team: DlrmRanks, shared: Path, run: str) -> None:
    """Those traces have no sizes. A step has five all-to-alls, and all-reduces of buckets, in one order."""
    path = shared / "traces" / "torchrec_dlrm_4xv100" / run / "rank_0.json.gz"
    events = _json(path)["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    steps = names.count("## forward ##")
    mine = Counter(collective(op) for op in team.team.steps[0].graph.ops)
    assert names.count("nccl:all_to_all") == mine["all_to_all"] * steps
    assert names.count("## all2all_data:kjt splits ##") == names.count("## all2all_data:kjt values ##") == steps


SLEEP = 1.0  # seconds that rank 2 was made to sleep in its exchange of pooled rows


@pytest.mark.parametrize("run", ["long_a2a_optimizer", "sleep_pl_dense_after_backward_2"])
def test_ranks_wait_for_one_that_sleeps_as_long_as_they_did(shared: Path, run: str) -> None:
    folder = shared / "traces" / "torchrec_dlrm_4xv100" / run
    waited = []
    for rank in range(4):
        events = _json(folder / f"rank_{rank}.json.gz")["traceEvents"]
        steps = sum(e.get("name", "").startswith("ProfilerStep") and e["cat"] == "user_annotation" for e in events)
        long = [e["dur"] * 1e-6 for e in events if e.get("cat") == "kernel" and "SendRecv" in e["name"]]
        waited.append(sum(d for d in long if d > 0.1) / max(1, steps))
    predicted = _waits_for_a_sleeper(rank=2)
    assert predicted[2] == pytest.approx(0.0, abs=1e-3)
    assert waited[2] < 0.05
    for rank in (0, 1, 3):
        assert predicted[rank] == pytest.approx(SLEEP, rel=0.02)
        assert waited[rank] == pytest.approx(predicted[rank], rel=0.15)


def _waits_for_a_sleeper(rank: int) -> list[float]:
    """Waits of four ranks a step, where one sleeps before it sends its pooled rows."""
    tables = tuple(Table(f"t{i}", 10_000 * (i + 1), 64, 4.0) for i in range(4))
    job = DlrmJob("job", tables, 2048, 4, "4xv100", bottom=(64,), top=(64, 1), precision="fp32")
    team = dlrm_ranks(job, given=ShardingPlan.table_wise(4, [0, 1, 2, 3])).team
    members = []
    for m in team.ranks.members:
        (op,) = (i for i, o in enumerate(m.step.graph.ops) if o.module == f"{SPARSE}output")
        seconds = m.tasks.seconds.copy()
        seconds[(m.tasks.op == op) & (m.tasks.lane < STREAM)] += SLEEP * (m.fold.rank == rank)
        members.append(m.with_seconds(seconds))
    assert [m.fold.rank for m in members] == [0, 1, 2, 3]
    many = rank_program(members, 4)
    return [wait for *_, wait in rank_uses(many, many.timeline())]
