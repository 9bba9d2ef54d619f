"""Published runs on several GPUs: each row becomes its model, strategy and machine, or a reason why not."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from commands import runner
from presage.capture import capture, load
from presage.errors import InputError, PresageError
from presage.parallel.ddp import Ddp
from presage.parallel.fsdp import Fsdp
from presage.pool import SERIAL
from presage.prediction.api import predict_ranks
from presage_validation import command as command
from presage_validation.public_table import read_setups, setup
from presage_validation.ranks import RanksForecast, _predict, score_ranks, with_kernels_of

BUILDERS = Path(__file__).resolve().parents[2] / "workloads/public.py"
MPT = {
    "source_key": "llm_foundry",
    "framework": "Composer",
    "model": "mpt-tiny",
    "hidden": "64",
    "layers": "2",
    "heads": "2",
    "kv_heads": "2",
    "ffn": "256",
    "vocab": "512",
    "seq_len": "128",
    "gpu": "A100-80GB-SXM",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "cp": "1",
    "ep": "",
    "fsdp_zero": "fsdp FULL_SHARD",
    "micro_batch": "2",
    "global_batch": "64",
    "precision": "amp_bf16",
    "recompute": "full",
    "step_time_s": "",
    "step_time_s_derived": "0.04",
    "peak_mem_gib": "",
    "notes": "MP mode DEFAULT; attn flash",
}
GPT = MPT | {
    "source_key": "neusight_train",
    "model": "gpt-tiny",
    "gpu": "NVIDIA_H100_80GB_HBM3",
    "gpus_per_node": "4",
    "n_gpus": "4",
    "heads": "4",
    "kv_heads": "4",
    "tp": "4",
    "dp": "1",
    "fsdp_zero": "none",
    "global_batch": "2",
    "precision": "fp32",
    "recompute": "none",
    "step_time_s": "0.02",
    "peak_mem_gib": "0.25",
    "notes": "option tp4",
}
LLAMA = MPT | {"source_key": "torchtitan", "model": "llama-tiny", "kv_heads": "1", "fsdp_zero": "fsdp2", "notes": ""}
run = runner(command.command)


def write(path: Path, *rows: Mapping[str, str]) -> Path:
    with path.open("w", newline="") as f:
        table = csv.DictWriter(f, list(MPT))
        table.writeheader()
        table.writerows(rows)
    return path


def test_a_row_becomes_a_model_a_strategy_and_a_machine() -> None:
    s = setup(MPT, 7)
    assert (s.line, s.source, s.platform, s.ranks, s.accumulate, s.seconds) == (
        7, "llm_foundry", "dgx-a100", 8, 4, 0.04,
    )  # fmt: skip
    assert s.arguments["family"] == "mpt" and s.arguments["recompute"] and s.arguments["batch"] == 2
    assert s.strategy.options == Fsdp(master_dtype="float32", reduce_dtype="float32")
    pure = setup(MPT | {"notes": "MP mode PURE"})
    assert pure.strategy.options == Fsdp(master_dtype="float32", reduce_dtype="bfloat16")
    assert setup(MPT | {"gpu": "A100-40GB-SXM"}).platform == "dgx-a100-40"


def test_megatron_shares_the_vocabulary_and_sends_gradients_at_the_end() -> None:
    s = setup(GPT)
    assert (s.platform, s.strategy.name, s.strategy.vocabulary, s.accumulate) == ("4xh100", "tp", True, 1)
    assert setup(GPT | {"vocab": "50257"}).arguments["vocab"] == 50688
    assert s.memory == 2**28
    both = setup(GPT | {"tp": "1", "dp": "4", "global_batch": "8", "vocab": "50257"})
    assert isinstance(both.strategy.options, Ddp) and both.strategy.options.bucket_cap_mb > 1e5
    assert not both.strategy.vocabulary and both.arguments["vocab"] == 50304


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_key": "dgxc"}, "models of dgxc are not built here"),
        ({"n_gpus": "1", "dp": "1"}, "one GPU"),
        ({"n_gpus": "16", "dp": "16"}, "more than one node"),
        ({"precision": "amp_fp8"}, "fp8"),
        ({"cp": "8", "dp": "1"}, "context parallelism"),
        ({"pp": "2", "dp": "4"}, "pipeline parallelism"),
        ({"framework": "torchtitan+compile"}, "compiled"),
        ({"recompute": "selective(op)"}, "recompute selective"),
        ({"recompute": ""}, "recompute not stated"),
        ({"global_batch": "60"}, "different sizes"),
        ({"gpu": "H100-96GB-HBM2e(500W)"}, "no platform has 8 H100-96GB"),
        ({"gpus_per_node": "6", "n_gpus": "6"}, "no platform has 6 A100"),
        ({"fsdp_zero": "none"}, "fully sharded"),
        ({"hidden": ""}, "hidden is not stated"),
        ({"kv_heads": "1"}, "grouped queries"),
        ({"kv_heads": "MLA"}, "kv_heads is 'MLA', not a number"),
        ({"step_time_s_derived": ""}, "no step time"),
    ],
)
def test_rows_that_are_left_out(change: dict[str, str], reason: str) -> None:
    with pytest.raises(PresageError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        setup(MPT | change)


def test_rows_left_out_are_told_by_line(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", MPT, MPT | {"precision": "fp8"}, MPT)
    good, skipped = read_setups(table)
    assert [s.line for s in good] == [2, 4] and good[0].key == good[1].key
    assert [(s.row, s.reason) for s in skipped] == [("line 3", "fp8 kernels are not modelled")]
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="source_key"):
        read_setups(tmp_path / "bad.csv")
    with pytest.raises(InputError):
        read_setups(tmp_path / "none.csv")


def test_microbatches_are_extended_from_two() -> None:
    one, two = RanksForecast(10.0, 8.0, 3.0, 1.0, 100.0), RanksForecast(18.0, 15.0, 6.0, 1.5, 110.0)
    assert one.extended(two, 3) == RanksForecast(34.0, 29.0, 12.0, 2.5, 110.0)
    assert one.extended(two, 1) == two


@pytest.mark.slow
def test_runs_are_predicted(tmp_path: Path) -> None:
    """A step of four microbatches, from captures of one and of two, is that of a capture of four."""
    table = write(tmp_path / "runs.csv", MPT, GPT, LLAMA, MPT | {"gpu": "H100-80GB-SXM"})
    result = score_ranks(BUILDERS, table, pool=SERIAL)
    assert not result.skipped and result.to_json()["n"] == 4
    assert [r.name for r in result.rows if r.metric == "peak_memory"] == [setup(GPT).name]
    assert result.groups()[:3] == ["llm_foundry", "neusight_train", "torchtitan"]
    assert result.metrics("llm_foundry")["step_time"].n == 2
    assert result.metrics("llm_foundry H100-80GB-SXM")["step_time"].n == 1
    s = setup(MPT)
    found = _predict(str(BUILDERS), [s])[s.line]
    assert isinstance(found, RanksForecast) and found.step == result.rows[0].predicted
    whole = with_kernels_of(s, capture(load(f"{BUILDERS}:build"), {**s.arguments, "accumulate": 4}))
    direct = predict_ranks(whole, 8, s.strategy, "dgx-a100", draws=1)
    assert found.step == pytest.approx(direct.step.p50, rel=0.02)
    assert found.compute == pytest.approx(direct.gpu_active, rel=0.02)
    assert found.memory == pytest.approx(direct.peak_memory, rel=0.02)


def test_the_command(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", GPT, MPT | {"cp": "2"})
    out = json.loads(run("ranks", BUILDERS, table, "--json", "-", "--out", tmp_path / "rows.csv"))
    assert out["kind"] == "ranks" and out["n"] == 1
    assert set(out["metrics"]) == {"step_time", "peak_memory", "compute_only", "no_overlap"}
    assert out["skipped"] == [{"row": "line 3", "reason": "context parallelism is not supported"}]
    lines = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [r["metric"] for r in lines] == ["step_time", "peak_memory", "compute_only", "no_overlap"]
    assert float(lines[0]["measured"]) == 0.02


@pytest.mark.parametrize(
    ("width", "heads", "layers", "sequence", "published"),
    [(1024, 16, 24, 512, 354_412_544), (4096, 32, 32, 1024, 6_654_664_704), (7168, 56, 48, 4096, 29_989_894_144)],
)
def test_mpt_has_as_many_parameters_as_published(
    width: int, heads: int, layers: int, sequence: int, published: int
) -> None:
    made = {"device": "meta", "dtype": torch.bfloat16}
    model = load(f"{BUILDERS}:Mpt")(50368, width, heads, layers, 4 * width, sequence, False, True, made)
    assert sum(p.numel() for p in model.parameters()) == published  # type: ignore[attr-defined]


def test_other_models_have_as_many_parameters_as_published() -> None:
    made = {"device": "meta"}
    llama = load(f"{BUILDERS}:Llama")(128256, 4096, 32, 8, 32, 14336, False, made)
    assert sum(p.numel() for p in llama.parameters()) == 8_030_261_248  # type: ignore[attr-defined]
    gpt = load(f"{BUILDERS}:Gpt")(50257, 1280, 20, 36, 5120, 1024, False, made)
    assert sum(p.numel() for p in gpt.parameters()) == 774_030_080  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_published_run(shared: Path, tmp_path: Path) -> None:
    """MPT-125M on 8 A100: nothing of it was fitted."""
    with (shared / "runs/public_runs.csv").open() as f:
        rows = [r for r in csv.DictReader(f) if r["model"] == "mpt-125m" and r["seq_len"] == "1024"]
    table = write(tmp_path / "runs.csv", *({k: r[k] for k in MPT} for r in rows if r["n_gpus"] == "8"))
    result = score_ranks(BUILDERS, table, pool=SERIAL)
    assert result.to_json()["n"] == 1 and abs(result.rows[0].error) < 0.25
