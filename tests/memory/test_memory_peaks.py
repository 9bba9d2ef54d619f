"""Memory of a job against published peaks, and against runs that did not fit."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from presage.configs.frameworks import Framework, Overlap
from presage.configs.job import Job, Recompute
from presage.configs.transformer import Experts, Latent, Transformer
from presage.hardware import platform
from presage.memory import job_memory
from presage.parallel.plan import ParallelPlan

GIB = 1024.0**3
TITAN = Framework(key="torchtitan", compiled=True, host="compiled")
DEEPSPEED = Framework(
    key="megatron-deepspeed",
    attention="fused-softmax",
    dropout=True,
    fused_loss=False,
    gradient_bytes=2,
    host="deepspeed",
)


def bloom(row: dict[str, str]) -> Job:
    """BigScience's trials (chronicles-prequel.md): Megatron-DeepSpeed, 250k tied vocabulary, read from nvidia-smi."""
    h, heads = int(row["hidden"]), int(row["heads"])
    style = {"activation": "gelu", "norm": "layernorm", "bias": True, "tied": True}
    model = Transformer(h, int(row["layers"]), heads, 250880, 4 * h, heads, h // heads, **style)
    balanced = "balanced" in row["notes"] or int(row["layers"]) == 106
    return Job(
        model, platform("jean-zay"), int(row["n_gpus"]), 2048, int(row["micro_batch"]), int(row["global_batch"]),
        ParallelPlan(tp=int(row["tp"]), pp=int(row["pp"]), zero=1, ends_as_layers=balanced),
        "bf16" if row["precision"] == "bf16" else "fp16", Recompute("full"), framework=DEEPSPEED,
    )  # fmt: skip


def simumax(row: dict[str, str]) -> Job:
    """Megatron-Core on eight B200, few layers, the first of the experts' models dense; max_memory_allocated."""
    h, layers, heads = (int(row[k]) for k in ("hidden", "layers", "heads"))
    model = Transformer(h, layers, heads, int(row["vocab"]), int(row["ffn"]), heads, 192 if h == 5120 else 128)
    if row["kv_heads"] == "MLA":
        width, shared = int(row["moe_ffn"]), 2 if h == 5120 else 1
        experts = Experts(int(row["moe_experts"]), int(row["moe_topk"]), width, shared * width, 1)
        model = replace(model, latent=Latent(1536, 512, 64, 128, 128), experts=experts)
    else:
        model = replace(model, kv_heads=int(row["kv_heads"]))
    tp, pp, cp = (int(row[k]) for k in ("tp", "pp", "cp"))
    return Job(
        model, platform("dgx-b200"), 8, int(row["seq_len"]), 1, int(row["global_batch"]),
        ParallelPlan(tp=tp, sequence_parallel=tp > 1, pp=pp, cp=cp, ep=int(row["ep"] or 1), zero=1),
        overlap=Overlap(False, False, False, False, False, False),
    )  # fmt: skip


def titan(row: dict[str, str]) -> Job:
    """TorchTitan, compiled, but for its loss in 2024 (its train.py: "turning off for now"); max_memory_reserved."""
    h, layers, heads = (int(row[k]) for k in ("hidden", "layers", "heads"))
    model = Transformer(h, layers, heads, 128256, int(row["ffn"]), 8, h // heads)
    tp, pp, cp = (int(row[k]) for k in ("tp", "pp", "cp"))
    where = "dgx-h200" if "H200" in row["gpu"] else "grand-teton"
    parallel = ParallelPlan(tp=tp, sequence_parallel=tp > 1, pp=pp, cp=cp, zero=3, fsdp=True, ends_as_layers=pp > 1)
    recompute = Recompute("selective", ("op",)) if "op" in row["recompute"] else Recompute("full")
    return Job(
        model, platform(where), int(row["n_gpus"]), int(row["seq_len"]), int(row["micro_batch"] or 1),
        int(row["global_batch"]), parallel, row["precision"], recompute,
        framework=replace(TITAN, fused_loss="2024" not in row["source_file"]),
    )  # fmt: skip


SOURCES = {"bloom_prequel": (bloom, 27, 0.05), "simumax_b200": (simumax, 22, 0.01), "torchtitan": (titan, 8, 0.04)}


def stated(shared: Path, source: str) -> list[dict[str, str]]:
    path = shared / "runs" / "public_runs.csv"
    if not path.exists():
        pytest.skip(f"no table of public runs at {path}")
    with path.open(newline="") as f:
        return [r for r in csv.DictReader(f) if r["source_key"] == source and r["peak_mem_gib"]]


@pytest.mark.parametrize("source", SOURCES)
def test_published_peaks(shared: Path, source: str) -> None:
    make, least, bar = SOURCES[source]
    rows = stated(shared, source)
    errors = []
    for row in rows:
        found = job_memory(make(row))
        assert found.fits, row
        errors.append(abs(found.peak / GIB / float(row["peak_mem_gib"]) - 1))
    assert len(errors) >= least
    assert sum(errors) / len(errors) < bar


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "tp", "pp", "micro_batch", "precision"),
    [(14336, 72, 64, 8, 1, 1, "fp16"), (14336, 72, 64, 2, 6, 2, "fp16"), (12288, 100, 64, 4, 6, 2, "bf16")],
)
def test_runs_that_did_not_fit(
    hidden: int, layers: int, heads: int, tp: int, pp: int, micro_batch: int, precision: str
) -> None:
    """Out of memory in the same chronicles, on 384 A100 with 80 GB."""
    row = {
        "hidden": hidden, "layers": layers, "heads": heads, "tp": tp, "pp": pp, "micro_batch": micro_batch,
        "n_gpus": 384, "global_batch": 2016 if pp == 1 else 2048, "precision": precision,
        "notes": "balanced" if precision == "bf16" else "",
    }  # fmt: skip
    found = job_memory(bloom({k: str(v) for k, v in row.items()}))
    assert not found.fits
    assert found.margin < 0
