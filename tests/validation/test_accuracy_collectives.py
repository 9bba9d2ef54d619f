"""The claims on collective times: the bars are met, nothing that is scored was fitted, and bad rows are told."""

import csv
import json
from pathlib import Path

import pytest

from commands import runner
from presage.costs.collectives import Collectives, RankGroup, evidence
from presage.errors import InputError, PresageError
from presage.hardware import platform
from presage_validation import command as command
from presage_validation.collectives import platform_of, read_rows, score_collectives

PUBLISHED = Path(__file__).parents[2] / "docs/published_collectives.csv"
COLUMNS = ("source", "gpu", "nodes", "n_gpus", "nccl", "op", "bytes", "time_us", "busbw_gbps", "note")
run = runner(command.command)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return path


def row(
    gpu: str = "h100_sxm", n: int = 8, op: str = "all_reduce", nbytes: int = 1 << 20, **more: object
) -> dict[str, object]:
    seconds = Collectives.of(platform("dgx-h100")).seconds("all_reduce", nbytes, RankGroup(8, 8))
    return {
        "source": "made",
        "gpu": gpu,
        "nodes": 1,
        "n_gpus": n,
        "op": op,
        "bytes": nbytes,
        "time_us": seconds * 1e6,
    } | more


@pytest.fixture(scope="module")
def scored(shared: Path):  # type: ignore[no-untyped-def]
    return score_collectives(shared / "runs/nccl_busbw.csv")


@pytest.mark.slow
def test_sizes_left_out_are_within_the_bars(scored) -> None:  # type: ignore[no-untyped-def]
    found = scored.metrics()
    assert not scored.skipped and found["time"].n == 691
    assert found["time"].mape < 0.045 and found["time"].p90 < 0.10  # the bars are 6% and 15%
    assert found["time"].mape < 0.85 * found["interpolated"].mape
    for gpu in ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200"):
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            assert scored.metrics(f"{gpu} {op}")["time"].median < 0.05


@pytest.mark.slow
def test_gpus_left_out(scored) -> None:  # type: ignore[no-untyped-def]
    missed = {
        g: scored.metrics(g)["gpu_left_out"].mape for g in ("h200_sxm", "h100_sxm", "b200_sxm", "gb200", "a100_sxm")
    }
    assert missed["h200_sxm"] < 0.07 and missed["h100_sxm"] < 0.07  # the bar is 20%
    assert missed["b200_sxm"] < 0.10 and missed["gb200"] < 0.10 and missed["a100_sxm"] < 0.10


@pytest.mark.slow
def test_groups_of_ranks_left_out(scored) -> None:  # type: ignore[no-untyped-def]
    """The bar within a node is 10%."""
    groups = {r.group for r in scored.rows if r.metric == "ranks_left_out"}
    assert len(groups) == 13
    assert all(scored.metrics(g)["ranks_left_out"].mape < 0.09 for g in groups)


@pytest.mark.slow
def test_links_left_out(scored) -> None:  # type: ignore[no-untyped-def]
    """A generation of links that nothing was measured on: the bar is 10%, which A100s keep and others miss by far."""
    missed = {f: scored.metrics(f)["links_left_out"].mape for f in ("nvlink3", "nvlink4", "nvlink5")}
    assert missed["nvlink3"] < 0.10 and missed["nvlink4"] < 0.36 and missed["nvlink5"] < 0.28


@pytest.mark.slow
def test_nodes_left_out(scored) -> None:  # type: ignore[no-untyped-def]
    """p4de's two nodes from a fit within nodes: the bar is 20%."""
    assert scored.metrics()["nodes_left_out"].n == 29 and scored.metrics()["nodes_left_out"].mape < 0.09


@pytest.fixture(scope="module")
def published():  # type: ignore[no-untyped-def]
    return score_collectives(PUBLISHED)


def test_published_figures_over_nodes(published) -> None:  # type: ignore[no-untyped-def]
    """Rows that no constant was set by, too; p4d of 2021 is above the bar of 20%, as the docs say."""
    rows = [r for r in published.rows if r.metric == "nodes_left_out"]
    assert not published.skipped and len(rows) == 111
    missed = {g: published.metrics(g)["nodes_left_out"].mape for g in {r.group for r in rows}}
    over = {g for g, m in missed.items() if m > 0.2}
    assert over == {"p4d, 2 nodes", "p4d, 3 nodes", "p4d, 4 nodes"}
    assert published.metrics()["nodes_left_out"].mape < 0.15


def test_ranges_hold_what_was_published(published) -> None:  # type: ignore[no-untyped-def]
    """The stated range between nodes holds about nine of ten."""
    ratios = [r.measured / r.predicted for r in published.rows if r.metric == "nodes_left_out"]
    inside = sum(evidence.NODES.low <= x <= evidence.NODES.high for x in ratios)
    assert 0.85 < inside / len(ratios) < 0.97


def test_a_table_may_name_its_network(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(n=16, nodes=2), row(n=16, nodes=2)])
    text = path.read_text().splitlines()
    text = [f"{text[0]},network_gbps,fabric", f"{text[1]},,", f"{text[2]},400,roce"]
    path.write_text("\n".join(text))
    fast, slow = (e.row.platform for e in read_rows(path)[0])
    assert fast.key == "dgx-h100" and slow.links[-1].fabric == "roce"
    assert slow.links[-1].bandwidth == fast.links[-1].bandwidth / 8


@pytest.mark.slow
def test_as_shipped(scored) -> None:  # type: ignore[no-untyped-def]
    found = scored.metrics()
    assert found["repeated"].mape < found["shipped"].mape < 0.035


def test_a_whole_group_size_left_out(shared: Path) -> None:
    """Four H200s from two and eight, and from the other GPUs."""
    from presage_fit.collectives import fit

    rows = [e.row for e in read_rows(shared / "runs/nccl_busbw.csv")[0]]
    kept = [r for r in rows if (r.platform.key, r.group.ranks) != ("dgx-h200", 4)]
    model = Collectives(platform("dgx-h200"), fit(kept))
    errors = [abs(model.seconds(r.op, r.nbytes, r.group) / r.seconds - 1) for r in rows if r not in kept]
    assert sum(errors) / len(errors) < 0.07


def test_what_is_left_out_is_not_fitted(tmp_path: Path) -> None:
    """Left-out rows may say anything: the predictions stay."""
    sizes = [1 << k for k in range(9, 30)]
    honest = [row(nbytes=m) for m in sizes]
    wild = [r | ({"time_us": 9999.0} if i % 3 == 2 else {}) for i, r in enumerate(honest)]
    found = [score_collectives(write(tmp_path / f"{i}.csv", rows)) for i, rows in enumerate((honest, wild))]
    predicted = [[r.predicted for r in f.rows if r.metric == "time"] for f in found]
    assert predicted[0] == predicted[1] and len(predicted[0]) == 7
    assert found[0].metrics()["time"].mape < 0.03 < found[1].metrics()["time"].mape


def test_rows_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        [
            row(),
            row(gpu="abacus"),
            row(op="gossip"),
            row(n=1),
            row(time_us="fast"),
            row(time_us=-1),
            row(op="AllGather"),
            row(op="reduce_scatter_perf"),
        ],
    )
    result = score_collectives(path)
    assert [s.row for s in result.skipped] == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    for said, s in zip(
        ("'abacus'", "'gossip'", "nobody", "'fast', not a number", "out of range"), result.skipped, strict=True
    ):
        assert said in s.reason
    assert result.metrics()["shipped"].n == 3 and result.to_json()["n"] == 0


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        score_collectives(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="gpu: no such column"):
        score_collectives(tmp_path / "other.csv")
    with pytest.raises(PresageError, match="takes one path"):
        run("collectives", tmp_path / "a.csv", tmp_path / "b.csv")


def test_names_of_tables() -> None:
    for name, key in (
        ("h100_sxm", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("b300_sxm", "dgx-b200"),
        ("gb300", "gb200-nvl72"),
        ("h20_sxm", "dgx-h200"),
        ("a100_80g p4de (4x100G EFA/node)", "p4de"),
        ("mi300x", "mi300x-ib"),
        ("l40s", "8xl40s"),
        ("v100_sxm2", "dgx-1-v100"),
        ("a100_pcie", "8xa100-pcie"),
    ):
        assert platform_of(name).key == key
    for name in ("abacus", "h100_pcie", "rtx4090"):
        with pytest.raises(PresageError, match="no platform for the GPU name"):
            platform_of(name)


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(nbytes=1 << k) for k in range(9, 30)])
    value = json.loads(run("collectives", path, "--json", "-", "--out", tmp_path / "rows.csv"))
    assert value["kind"] == "collectives" and value["n"] == 7 and value["metrics"]["time"]["n"] == 7
    assert set(value["metrics"]["time"]) == {"n", "mape", "geomean", "median", "p90", "max", "bias"}
    assert "h100_sxm all_reduce" in value["groups"]
    assert (tmp_path / "rows.csv").read_text().startswith("metric,group,name,predicted,measured,error\n")
    assert "h100_sxm all_reduce" in run("collectives", path)
