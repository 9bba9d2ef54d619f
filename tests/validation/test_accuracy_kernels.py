"""Kernel accuracy: held-out shapes of a pack are never fitted, and tables of kernel times become the right calls."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.costs.calibrated_kernels import call_times
from presage.costs.families import BY_OP, FAMILIES
from presage.costs.rates import Rates
from presage.errors import InputError
from presage.hardware import gpu
from presage_fit.kernel_models import held_out, samples, table
from presage_fit.pack import Pack, read
from presage_fit.table_split import held_out_widths, is_fitted
from presage_validation.kernel_tables import BUILDERS, ISSUE, Unknown, attention, gemm, read_table
from presage_validation.kernels import (
    _apart,
    models_of,
    score_kernels,
    score_pack,
    score_table,
    within_bars,
)
from presage_validation.score import AccuracyResult, Row

PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack"
GEMM = "framework,version,kernel,dtype,m,n,k,latency_ms"


@pytest.fixture(scope="module")
def pack() -> Pack:
    """Every fourth draw of two small families."""
    whole = read(PACK)
    few = {name: whole.families[name][::4] for name in ("softmax", "random")}
    return replace(whole, families=few)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


# ---- packs


@pytest.mark.slow
def test_no_scored_call_is_fitted(pack: Pack) -> None:
    some = samples(pack)["softmax"]
    data = table(FAMILIES["softmax"], some, Rates.of(gpu("h200")))
    fifth, large = held_out(some, data)
    is_fitted = _apart(some, data, fifth | large)
    assert 0.5 < is_fitted.mean() < 0.85 and not (is_fitted & (fifth | large)).any()
    keys = [s.call.key for s in some]
    assert not {keys[i] for i in data.sample[is_fitted]} & {keys[i] for i in data.sample[fifth | large]}


@pytest.mark.slow
def test_a_pack_is_scored_by_family_warm_and_cold_and_beside_its_law(pack: Pack) -> None:
    told: list[str] = []
    result = score_pack(pack, told.append, ("softmax", "random", "sort"))
    assert told == ["softmax", "random"] and [s.row for s in result.skipped] == ["sort"]
    found = result.metrics("softmax")
    assert found["time"].n == found["law"].n > 50 and found["time_extrapolated"].n == found["law_extrapolated"].n > 5
    assert found["time"].geomean < 0.5 * found["law"].geomean
    assert {r.name.split()[-1] for r in result.rows} == {"warm", "cold"}
    out = result.to_json()
    assert out["n"] == out["metrics"]["time"]["n"] and "2 families" in out["notes"][0]
    assert out["metrics"]["families_within_bars"] == np.mean(list(within_bars(result).values()))


@pytest.mark.parametrize(
    ("errors", "passed"), [([0.01] * 20, True), ([0.3] * 3 + [0.001] * 17, False), ([0.06] * 20, False)]
)
def test_a_family_is_within_bars_only_with_both(errors: list[float], passed: bool) -> None:
    rows = tuple(Row("time", "gemm", "", 1 + e, 1.0) for e in errors)
    assert within_bars(AccuracyResult("kernels", "", rows)) == {"gemm": passed}


# ---- what rows of tables are


def test_a_product_has_its_weights_transposed() -> None:
    kernel, call, flops, sizes = gemm({"m": 3, "n": 5, "k": 7}, "bf16")
    x, w = call.tensors
    assert (kernel, call.name, flops, sizes) == ("gemm", "aten::mm", 2 * 3 * 5 * 7, (3, 5, 7))
    assert (x.sizes, x.strides, w.sizes, w.strides) == ((3, 7), (7, 1), (7, 5), (1, 7)) and w.dtype == "bfloat16"


def test_attention_is_causal_and_a_window_cuts_the_keys() -> None:
    sizes = {"batch": 2, "seq_len": 4096, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "window_size": 0}
    whole = attention(sizes, "bf16")
    assert whole.call.tensors[1].sizes == (2, 8, 4096, 128) and whole.call.inputs[10] is True
    cut = attention(sizes | {"window_size": 1024}, "bf16")
    assert cut.kernel == "attention, window" and cut.call.tensors[1].sizes[2] == 1152 and cut.call.inputs[10] is False
    assert attention(sizes | {"window_size": 4096}, "bf16").call.key == whole.call.key
    assert attention(sizes | {"head_dim": 256}, "bf16").call.name == "aten::_flash_attention_forward"
    with pytest.raises(Unknown, match="wider"):
        attention(sizes | {"head_dim": 512}, "bf16")
    with pytest.raises(Unknown, match="fp8"):
        attention(sizes, "fp8")


def test_every_op_of_the_tables_has_a_model_that_can_time_it() -> None:
    sizes = dict.fromkeys(("B", "M", "N", "K", "H", "C_in", "C_out", "HW"), 64) | {
        "ksize": 3,
        "stride": 1,
        "padding": 1,
    }
    calls = [build(sizes) for _, build in BUILDERS.values()]
    assert all(c.name in BY_OP for c in calls)
    times = call_times(models_of(gpu("h200"))[0], calls)
    assert all(5e-7 < t.warm < 1e-3 for t in times)


# ---- tables


def test_collectors_are_joined_by_their_median_and_their_spread_told(tmp_path: Path) -> None:
    rows = [f"e,{v},k,bf16,1024,4096,4096,{t}" for v, t in enumerate((0.05, 0.06, 0.09))]
    found = read_table(write(tmp_path / "h200_sxm_gemm.csv", GEMM, *rows))
    (shape,) = found.shapes
    assert shape.by == tuple((f"e {v} k", pytest.approx(t * 1e-3)) for v, t in enumerate((0.05, 0.06, 0.09)))
    assert shape.gpu.key == "h200" and shape.seconds == pytest.approx(60e-6)
    assert shape.spread == pytest.approx((1 / 6 + 0 + 1 / 2) / 3)
    result = score_table(found)
    assert result.metrics()["collectors"].mape == pytest.approx(shape.spread) and len(result.notes) == 1


def test_what_cannot_be_used_is_counted_and_named(tmp_path: Path) -> None:
    rows = [
        "e,1,k,bf16,1024,4096,4096,0.15",
        "e,1,k,bf16,2048,4096,4096,none",
        "e,1,k,bf16,2048,4096,4096,-1",
        "e,1,k,bf16,2048",
        "e,1,k,fp8,1024,4096,4096,0.04",
        "e,1,k,bf16,0,4096,4096,0.04",
        "bad,1,k,bf16,4096,4096,4096,0.0001",  # a thousand times the peak
        "bad,1,k,bf16,64,4096,4096,0.02",
        "e,1,k,bf16,512,4096,4096,0.5",  # slower than with more rows
    ]
    found = read_table(write(tmp_path / "a100_sxm_gemm.csv", GEMM, *rows))
    assert [s.name for s in found.shapes] == ["m=1024 n=4096 k=4096"]
    told = {s.reason: s.row for s in found.skipped}
    assert sum(s.row.startswith("line") for s in found.skipped) == 3
    assert told["no model of numbers of type 'fp8'"].startswith("1 rows") and "m is 0" in told
    assert told["collector bad 1 k has times beyond the GPU's peak"].startswith("2 rows")
    assert any("slower than with more rows" in reason for reason in told)


def test_gpus_are_told_apart_and_those_without_facts_named(tmp_path: Path) -> None:
    devices = ("NVIDIA H200", "NVIDIA L4", "Tesla P4", "Tesla P4")
    path = write(
        tmp_path / "t.csv", "op,device,B,H,latency_ms", *(f"add,{d},512,{h},1" for h, d in enumerate(devices, 9))
    )
    result = score_table(read_table(path))
    assert result.groups() == ["h200 elementwise", "l4 elementwise (transferred)"] and "L4" in result.notes[0]
    assert [(s.row, s.reason) for s in result.skipped] == [("2 rows of t.csv", "no facts of this GPU: Tesla P4")]
    fast, slow = (r.predicted for r in result.rows if r.metric == "law")
    assert slow > fast  # each by its own law


def test_short_rows_count_but_once(tmp_path: Path) -> None:
    rows = [f"add,NVIDIA H200,{n},1024,{t}" for n, t in ((4, 0.005), (100_000, 0.3))]
    result = score_table(read_table(write(tmp_path / "t.csv", "op,device,B,H,latency_ms", *rows)))
    found = result.metrics()
    assert (found["time"].n, found["time_over_20us"].n, result.to_json()["n"]) == (2, 1, 2)


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("x.csv", ["m,n,k"], "latency_ms: no such column"),
        ("x.csv", ["a,b,latency_ms", "1,2,3"], "unknown kind of kernel table"),
        ("x.csv", ["dtype,m,n,k,latency_ms", "bf16,1,1,1,1"], "of which GPU"),
        ("x.csv", [""], "latency_ms"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(tmp_path: Path, name: str, lines: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_table(write(tmp_path / name, *lines))


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        score_kernels([tmp_path / "none.csv"])
    with pytest.raises(InputError, match="neither"):
        score_kernels([tmp_path])


def test_the_command_scores_a_folder_of_tables(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    write(folder / "h200_sxm_gemm.csv", GEMM, "e,1,k,bf16,1024,4096,4096,0.06")
    write(folder / "l4_gemm.csv", GEMM, "e,1,k,bf16,1024,4096,4096,0.5")
    out, rows = tmp_path / "out.json", tmp_path / "rows.csv"
    args = ["accuracy", "kernels", str(folder), "--json", str(out), "--out", str(rows)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["kind"], found["n"], found["skipped"]) == ("kernels", 2, []) and "never calibrated" in done.output
    assert set(found["groups"]) == {"h200 gemm", "h200 gemm, between fitted shapes", "l4 gemm (transferred)"}
    with rows.open() as f:
        lines = list(csv.DictReader(f))
    assert {r["name"] for r in lines} == {"m=1024 n=4096 k=4096"} and {"time", "law"} <= {r["metric"] for r in lines}


def test_shapes_that_were_fitted_are_scored_apart(tmp_path: Path) -> None:
    tokens = range(1, 400)
    rows = [f"vllm,0.19.0,vllm_default,bf16,{m},{n},1024,0.02" for m in tokens for n in (1024, 4096)]
    result = score_table(read_table(write(tmp_path / "h100_sxm_gemm.csv", GEMM, *rows)))
    by = {metric: {r.name for r in result.rows if r.metric == metric} for metric in ("time", "time_fitted", "kernel")}
    was = {f"m={m} n={n} k=1024" for m in tokens for n in (1024, 4096) if is_fitted("gemm", (m, n, 1024))}
    assert by["time_fitted"] == was and 0 < len(was) < 300
    assert by["time"] == by["kernel"] and not by["time"] & was and len(by["time"] | was) == 2 * len(tokens)
    assert result.to_json()["n"] == len(by["time"])
    for r in (r for r in result.rows if r.metric == "time"):
        never = held_out_widths("gemm", [int(p.split("=")[1]) for p in r.name.split()])
        assert r.also == ("h100_sxm gemm" + (", widths never fitted" if never else ", between fitted shapes"),)


def test_a_table_of_an_engine_that_is_not_known_is_still_scored(tmp_path: Path) -> None:
    header = "dtype,batch,seq_len,num_heads,num_kv_heads,head_dim,window_size,latency_ms"
    rows = [f"bf16,{b},1024,32,8,128,{w},0.3" for b in (1, 2, 4) for w in (0, 128)]
    found = score_table(read_table(write(tmp_path / "a100_sxm_context_attention.csv", header, *rows)))
    assert sum(r.metric in ("time", "time_fitted") for r in found.rows) == 6 and not found.skipped
    assert all(1e-5 < r.predicted < 1e-2 for r in found.rows if r.metric in ("time", "time_fitted"))


@pytest.mark.parametrize("kernel", ["gemm", "context_attention"])
@pytest.mark.parametrize("name", ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"])
def test_engines_are_predicted_on_shapes_that_were_not_fitted(
    shared: Path, tmp_path: Path, name: str, kernel: str
) -> None:
    """Every collector of some shapes of each table: a mean error of 10% at most, also for widths never fitted."""
    path = shared / "kernels" / "aiconfigurator" / f"{name}_{kernel}.csv.gz"
    if not path.exists():
        pytest.skip(f"no table {path}")
    with gzip.open(path, "rt") as f:
        header, *lines = f.read().splitlines()
    few = [line for line in lines if crc32(",".join(line.split(",")[3:-1]).encode()) % 40 == 0]
    result = score_table(read_table(write(tmp_path / path.name.removesuffix(".gz"), header, *few)))
    never = [g for g in result.groups() if g.endswith("widths never fitted")]
    assert result.metrics()["time"].n > 100 and never
    assert result.metrics()["time"].mape < 0.10
    assert all(result.metrics(g)["time"].mape < 0.10 for g in never)


def test_published_tables_of_other_gpus_are_predicted(shared: Path, tmp_path: Path) -> None:
    """Every 20th row: the geomean error of rows over 20 us."""
    path = shared / "kernels" / "neusight" / "test_elementwise.csv.gz"
    if not path.exists():
        pytest.skip(f"no table {path}")
    with gzip.open(path, "rt") as f:
        header, *lines = f.read().splitlines()
    result = score_table(read_table(write(tmp_path / path.name.removesuffix(".gz"), header, *lines[::20])))
    assert result.metrics()["time_over_20us"].geomean < 0.10


def test_host_time_in_a_table_counts_for_the_law_too(tmp_path: Path) -> None:
    """NeuSight's tables: as much is added to both, and by the kind of op."""
    path = tmp_path / "train_layernorm.csv"
    path.write_text("op,device,B,H,latency_ms\nln,NVIDIA L4,8192,1024,0.3\nsoftmax,NVIDIA L4,8192,1024,0.3\n")
    table = read_table(path)
    assert [s.issue for s in table.shapes] == [ISSUE["layernorm"], ISSUE["softmax"]]
    bare = replace(table, shapes=tuple(replace(s, issue=0.0) for s in table.shapes))
    for metric in ("time", "law"):
        with_host, without = ([r.predicted for r in score_table(t).rows if r.metric == metric] for t in (table, bare))
        added = sorted(a - b for a, b in zip(with_host, without, strict=True))
        assert added == pytest.approx(sorted(s.issue for s in table.shapes))
