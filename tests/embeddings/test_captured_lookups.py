"""Recommendation models from code: tables spread over ranks by hand, and by TorchRec."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.costs.lookups.captured import captured_tables, lookup_seconds
from presage.embeddings import Reuse, Table, embedding_model
from presage.errors import PresageError

CLASSIC = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = [40000, 3000, 120000, 17, 5000]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits):
        ctx.splits = in_splits, out_splits
        out = x.new_empty(sum(out_splits))
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits)
        return out

    @staticmethod
    def backward(ctx, g):
        out_splits, in_splits = ctx.splits
        out = g.new_empty(sum(out_splits))
        dist.all_to_all_single(out, g.contiguous(), out_splits, in_splits)
        return out, None, None


def build(device, batch=1024, dim=16, pooling=4):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    held = [[t for t in range(len(ROWS)) if t % world == r] for r in range(world)]
    tables = nn.ModuleList(nn.EmbeddingBag(ROWS[t], dim, mode="sum", sparse=True) for t in held[rank]).to(device)
    bottom = DDP(nn.Linear(13, dim).to(device))
    top = DDP(nn.Linear(dim * (len(ROWS) + 1), 1).to(device))
    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters(), *tables.parameters()], lr=0.1)
    local = batch // world
    x, y = torch.randn(local, 13, device=device), torch.zeros(local, 1, device=device)
    indices = [torch.randint(0, ROWS[t], (batch * pooling,), device=device) for t in held[rank]]
    offsets = torch.arange(0, batch * pooling, pooling, device=device)

    def step():
        optimizer.zero_grad()
        pooled = torch.cat([table(i, offsets).view(-1) for table, i in zip(tables, indices)])
        got = Exchange.apply(pooled, [local * len(h) * dim for h in held], [local * len(held[rank]) * dim] * world)
        out = top(torch.cat([bottom(x), got.view(local, -1)], 1))
        nn.functional.binary_cross_entropy_with_logits(out, y).backward()
        optimizer.step()

    return step
"""
TORCHREC = """
import os

import torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ROWS = [40000, 3000, 120000, 17, 5000]


class Batch:
    pass


def build(device, batch=1024, dim=16, pooling=4, kind="table_wise"):
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    world, keys = dist.get_world_size(), [f"f{i}" for i in range(len(ROWS))]
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=n, feature_names=[keys[i]])
        for i, n in enumerate(ROWS)
    ]
    model = DLRMTrain(
        DLRM(EmbeddingBagCollection(tables=tables, device=torch.device("meta")), 13, [32, dim], [64, 1], device)
    )
    apply_optimizer_in_backward(torch.optim.SGD, model.model.sparse_arch.parameters(), {"lr": 0.1})
    topology = Topology(world_size=world, compute_device="cuda", local_world_size=world)
    constraints = {t.name: ParameterConstraints(sharding_types=[kind]) for t in tables}
    sharder = EmbeddingBagCollectionSharder()
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, [sharder])
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    optimizer, local = torch.optim.SGD(dense, lr=0.1), batch // world
    inputs = Batch()
    inputs.dense_features = torch.randn(local, 13, device=device)
    inputs.labels = torch.zeros(local, device=device)
    inputs.sparse_features = KeyedJaggedTensor(
        keys,
        torch.cat([torch.randint(0, n, (local * pooling,), device=device) for n in ROWS]),
        lengths=torch.full((local * len(ROWS),), pooling, dtype=torch.int64, device=device),
    )

    def step():
        optimizer.zero_grad()
        model(inputs)[0].backward()
        optimizer.step()

    return step
"""


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return f"{path}:build"


@pytest.mark.slow
def test_classic_code_keeps_uneven_placement(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import presage as ps

    found = ps.predict_ranks(_written(tmp_path / "classic.py", CLASSIC), 4, draws=1)
    assert found.many is not None
    assert [k.ranks for k in found.many.kinds] == [1, 1, 1, 1]  # ranks 0 to 3 hold 2, 1, 1, 1 tables of other sizes
    sent = sorted((c.nbytes, c.calls) for c in found.many.collectives if c.name == "all_to_all")
    assert sum(calls for _, calls in sent) == 4  # of two steps that differ, there and back
    assert max(n for n, _ in sent) == 2 * 1024 * 16 * 4  # the rank with two tables sends two pooled rows of a sample


def test_shard_takes_tables_from_code(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from presage.prediction.api import step_graph

    source = _written(tmp_path / "classic.py", CLASSIC)
    tables, batch = captured_tables(step_graph(source))
    assert [(t.rows, t.dim, t.pooling) for t in tables] == [(n, 16, 4.0) for n in (40000, 3000, 120000, 17, 5000)]
    assert batch == 1024
    shown = CliRunner().invoke(app, ["shard", source, "--ranks", "2", "--seconds", "1"])
    assert shown.exit_code == 0, shown.output
    assert "5 tables on 2 ranks" in shown.output


def test_code_without_tables_is_told() -> None:
    torch = pytest.importorskip("torch")
    from presage.prediction.api import step_graph

    def build(device: str) -> object:
        layer, x = torch.nn.Linear(4, 4, device=device), torch.ones(2, 4, device=device)
        return lambda: layer(x).sum().backward()

    with pytest.raises(PresageError, match="looks up no embedding tables"):
        captured_tables(step_graph(build))


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_torchrec_is_captured_with_its_plan(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchrec")
    from presage.hardware import gpu
    from presage.prediction.api import rank_set_of

    source = _written(tmp_path / "trec.py", TORCHREC)
    team = rank_set_of(source, 4, None, "dgx-h200", {"kind": kind})
    graph, times = team.steps[0].graph, team.times[0]
    names = [op.name for op in graph.ops]
    assert names.count("fbgemm::split_embedding_codegen_lookup_function") == 1
    assert names.count("fbgemm::split_embedding_codegen_lookup_functionBackward") == 1
    exchanges = [n for n in names if "alltoall" in n or "reduce_scatter" in n or "allgather" in n]
    assert len(exchanges) == 5  # sizes, lengths, indices; pooled rows there and back
    assert any("repeat as in the captured batch, whose lookups have a skew of 0 (" in note for note in graph.notes)
    for place, seconds in lookup_seconds(graph, gpu("h200")).items():
        assert times[place].seconds == pytest.approx(seconds, rel=0.2)  # but for throttling


def test_lookups_are_priced_by_the_embedding_model() -> None:
    from presage.graph.builder import GraphBuilder, new_op
    from presage.graph.graph import Ref
    from presage.hardware import gpu

    builder = GraphBuilder(flags={})
    shapes = {"weights": ((40000 * 64,), "float32"), "indices": ((81920,), "int64"), "offsets": ((8193,), "int64")}
    ids = []
    for shape, dtype in shapes.values():
        storage = builder.add_storage(8 * shape[0], "input", lifetime="always")
        ids.append(builder.add_tensor(storage, shape, dtype))
    name = "fbgemm::split_embedding_codegen_lookup_function"
    builder.append(new_op(name, [*map(Ref, ids), [40000], [64]], outputs=()))
    table = Table("t", 40000, 64, 10.0, Reuse(alpha=0.0))
    assert lookup_seconds(builder.build(source="x"), gpu("h200"))[0] == pytest.approx(
        embedding_model(gpu("h200")).forward([table], 8192)
    )


def test_table_row_wise_meets_inside_the_node_and_between_nodes(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import rank_set_of

    code = TORCHREC.replace("local_world_size=world", "local_world_size=int(os.environ['LOCAL_WORLD_SIZE'])")
    source = _written(tmp_path / "trw.py", code)
    team = rank_set_of(source, 4, None, "4xgv100", {"kind": "table_row_wise"})  # pairs of GPUs count as nodes
    groups = {op.group for step in team.steps for op in step.graph.ops if op.group}
    assert {"world", "2 ranks, 1 apart", "2 ranks, 2 apart"} <= groups
    held = {
        rank: op.inputs[-3] for s in team.steps for op in s.graph.ops if _is_lookup(op.name) for rank in s.graph.ranks
    }
    assert sorted(held) == [0, 1, 2, 3] and held[0] == held[1] != held[2] == held[3]  # nodes hold tables of their own
    assert team.timeline.end.max() > 0


def _is_lookup(name: str) -> bool:
    return name == "fbgemm::split_embedding_codegen_lookup_function"


def test_a_node_without_tables_takes_part_in_exchanges_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import predict_ranks

    code = TORCHREC.replace("local_world_size=world", "local_world_size=int(os.environ['LOCAL_WORLD_SIZE'])")
    code = code.replace("ROWS = [40000, 3000, 120000, 17, 5000]", "ROWS = [40000]")
    found = predict_ranks(_written(tmp_path / "one.py", code), 4, None, "4xgv100", {"kind": "table_row_wise"}, draws=1)
    assert found.many is not None and min(c.nbytes for c in found.many.collectives) == 0
    assert all(c.busbw >= 0 for c in found.many.collectives)


def test_lookups_of_a_skewed_batch_are_priced_by_their_skew(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import rank_set_of

    even = "torch.randint(0, n, (local * pooling,), device=device)"
    assert even in TORCHREC
    code = TORCHREC.replace(even, "(torch.rand(local * pooling) ** 8 * n).long().to(device)")
    team = rank_set_of(_written(tmp_path / "skew.py", code), 2, None, "dgx-h200", {"batch": 32768})
    tables, _ = captured_tables(team.steps[0].graph)
    assert max(t.reuse.alpha or 0.0 for t in tables) > 0.5
    assert any("captured batch, whose lookups have a skew of 0" in note for note in team.steps[0].graph.notes)


def test_a_skew_is_counted_where_rows_repeat_more_than_by_chance() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("torch")
    from presage.capture.torchrec_hooks import skew_of

    rng = np.random.default_rng(0)
    assert skew_of(rng.integers(0, 100_000, 4096), 100_000) == 0.0
    assert skew_of((100_000 * rng.random(4096) ** 8).astype(int), 100_000) > 0.5
    assert skew_of(rng.integers(0, 1, 0), 100_000) == 0.0


KERNEL = "ParameterConstraints(sharding_types=[kind])"


def test_tables_in_host_memory_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import rank_set_of

    cached = KERNEL.replace("[kind]", "[kind], compute_kernels=['fused_uvm_caching']")
    source = _written(tmp_path / "cached.py", TORCHREC.replace(KERNEL, cached))
    with pytest.raises(PresageError, match=r"tables in host memory .* are not captured: use the kernel 'fused'"):
        rank_set_of(source, 2, None, "dgx-h200", {})


def test_sequence_embeddings_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import rank_set_of

    code = TORCHREC.replace("EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder")
    code = code.replace("distributed.embeddingbag", "distributed.embedding").replace("EmbeddingBag", "Embedding")
    code = code.replace("class Batch:", "class Net(torch.nn.Module):\n    pass\n\n\nclass Batch:")
    model = code[code.index("    model = DLRMTrain(") : code.index("    apply_optimizer")]
    code = code.replace(
        model, "    model = Net()\n    model.rows = EmbeddingCollection(tables=tables, device=torch.device('meta'))\n"
    ).replace("model.model.sparse_arch", "model.rows")
    with pytest.raises(PresageError, match=r"sequence embeddings .* are not modelled"):
        rank_set_of(_written(tmp_path / "sequence.py", code), 2, None, "dgx-h200", {})


def test_types_of_weights_and_pooled_rows_and_the_optimizer_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from presage.prediction.api import rank_set_of

    code = TORCHREC.replace("feature_names=[keys[i]])", "feature_names=[keys[i]], data_type=DataType.FP16)")
    code = code.replace("KeyedJaggedTensor\nfrom", "KeyedJaggedTensor, DataType\nfrom", 1)
    code = code.replace("CollectionSharder()", "CollectionSharder(fused_params={'output_dtype': DataType.BF16})")
    code = code.replace("apply_optimizer_in_backward(torch.optim.SGD", "apply_optimizer_in_backward(torch.optim.Adam")
    graph = rank_set_of(_written(tmp_path / "narrow.py", code), 2, None, "dgx-h200", {}).steps[0].graph
    tables, _ = captured_tables(graph)
    assert {t.dtype for t in tables} == {"float16"}
    lookup = next(op for op in graph.ops if _is_lookup(op.name))
    assert {t.dtype for t in graph.outputs_of(lookup)} == {"bfloat16"}
    assert "FBGEMM's update of rows by adam was not measured: it is priced as row-wise Adagrad's" in graph.notes


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_updates_are_priced_by_optimizer_and_type_of_weights(optimizer: str) -> None:
    from presage.graph.builder import GraphBuilder, new_op
    from presage.graph.graph import Ref
    from presage.hardware import gpu

    builder = GraphBuilder(flags={})
    ids = []
    for shape, kind in (((40_000_000,), "float16"), ((8192, 64), "float32"), ((81920,), "int64"), ((8193,), "int64")):
        ids.append(builder.add_tensor(builder.add_storage(8, "input", lifetime="always"), shape, kind))
    name = "fbgemm::split_embedding_codegen_lookup_functionBackward"
    builder.append(new_op(name, [*map(Ref, ids), optimizer, [625_000], [64], [0.0]], outputs=()))
    table = Table("t", 625_000, 64, 10.0, Reuse(alpha=0.0), "float16")
    assert lookup_seconds(builder.build(source="x"), gpu("h200"))[0] == pytest.approx(
        embedding_model(gpu("h200")).backward([table], 8192, optimizer=optimizer)
    )
