"""Small sound files of every kind that presage reads, to be spoiled."""

from __future__ import annotations

import gzip
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PRESAGE = ROOT / "src" / "presage"
EXAMPLES = ROOT / "examples"


def as_json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def shipped(*names: str) -> tuple[bytes, ...]:
    return tuple((PRESAGE / name).read_bytes() for name in names)


# ---- traces


def kineto(rank: int | None = None, world: int | None = None) -> bytes:
    from synthetic import Tracer

    t = Tracer(rank, world)
    t.step(0, 0, 100)
    t.op("aten::linear", 10, 50, **{"Input Dims": [[2, 3], []], "Input type": ["float", ""], "Sequence number": 3})
    t.launch("gemm", 30, 45, 20)
    t.kernel("ncclDevKernel_AllReduce", 70, 10, t.call("cudaLaunchKernelExC", 55, 3), stream=20)
    t.events[-1]["args"] |= {"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float", "Group size": 2}
    t.call("cudaStreamSynchronize", 60, 30)
    t.op("MulBackward0", 65, 8, tid=2, **{"Sequence number": 3})
    t.events += [{"ph": "s", "cat": "fwdbwd", "id": 1, "pid": 100, "tid": 1, "ts": 10, "name": "fwdbwd"}]
    t.events += [{"ph": "M", "name": "thread_name", "pid": 100, "tid": 1, "args": {"name": "main"}}]
    return t.text()


VALUES = [[5, 6, 0, 4, 4, "cuda:0"], [[1, 2, 0, 4, 4, "cpu"], [3, 0, 0, 0, 0, ""]], "<None>", [1, [2]], -0.5]
DIMS = [[2, 2], [[4], []], [], [[], [[]]], []]
TYPES = ["Tensor(float)", "GenericList[Tensor(int),Tensor(nullptr (uninitialized))]", "None", "Tuple[Int]", "Double"]


def flat(i: int, parent: int, name: str = "aten::add", **more: Any) -> dict[str, Any]:
    """A node of an execution trace of schema 1.0.1."""
    io = {
        f"{side}put{kind}": value
        for side in ("in", "out")
        for kind, value in zip(("s", "_shapes", "_types"), (VALUES, DIMS, TYPES), strict=True)
    }
    ids = {"rf_id": i, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": "aten::add()"}
    return {"id": i, "name": name, "parent": parent} | ids | io | more


def nested(i: int, parent: int, name: str = "record_param_comms") -> dict[str, Any]:
    """And of the later schemas."""
    io = {
        "values": [*VALUES, 1, "allreduce", [], [], 0, 1, 2],
        "shapes": [*DIMS, *[[]] * 7],
        "types": [*TYPES, *["Int"] * 7],
    }
    attrs = {"rf_id": i, "fw_parent": 1, "seq_id": 4, "scope": 7, "tid": 1, "op_schema": "", "pg_name": "0"}
    named = [{"name": k, "type": "x", "value": v} for k, v in attrs.items()]
    return {"id": i, "name": name, "ctrl_deps": parent, "inputs": io, "outputs": io, "attrs": named}


KERNEL: dict[str, Any] = {"cat": "kernel", "ts": 17.5, "dur": 2.0, "args": {"stream": 7}}
ETS = [
    {"schema": "1.0.1", "nodes": [flat(1, 1, "[pytorch|profiler|execution_trace|process]"), flat(2, 1), flat(3, 2)]},
    {"schema": "1.0.3-chakra.0.0.4", "nodes": [nested(1, 1), nested(3, 2), nested(2, 1)]},
    {"schema": "1.0.1", "nodes": [flat(1, 1, ts=1.0, dur=30.0), flat(2, 1, ts=2.0, dur=3.0), flat(3, 2, **KERNEL)]},
]
FEEDER = {
    "workload_graph": [
        {"Id": 1, "Name": "a", "NodeType": 4, "ctrlDeps": [9], "data_deps": [], "runtime": 3, "is_cpu_op": True},
        {"Id": 2, "Name": "b", "NodeType": 7, "data_deps": [1], "is_cpu_op": False, "comm_size": 4},
    ]
}


def chakra_file() -> bytes:
    from chakra_bytes import attr, chakra, field, node

    io = field(1, repr(VALUES)) + field(2, repr(DIMS)) + field(3, repr(TYPES))
    first = node(0, field(8, io), field(10, attr("is_cpu_op", 27, 1)), field(10, attr("tid", 9, 1)))
    schema = field(10, attr("op_schema", 29, "x"))
    second = node(1, field(4, b"\x00"), field(5, b"\x00"), field(7, 318), field(9, io), schema)
    dim = field(10, attr("involved_dim", 28, field(1, b"\x01\x00")))
    third = node(2, field(4, 1), field(6, 5), dim, kind=7)
    return chakra(first, second, third, meta=field(1, "0.0.4") + field(2, attr("schema", 29, "1.0.1")))


def operations() -> bytes:
    """Two workers, two stages, two steps of two microbatches."""
    rows = ["dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id,gmc"]
    for step in (1, 2):
        for dp in (0, 1):
            for stage in (0, 1):
                for seq, (way, mb) in enumerate((w, m) for w in ("forward", "backward") for m in (0, 1)):
                    start = 10 * step + seq + 0.1 * stage + 0.01 * dp
                    place = f"{dp},{stage},{2 * dp + stage},{step}"
                    rows.append(f"{place},{way}-compute,{start:.2f},0.{seq + 5},{seq},0,{mb},0")
    return "\n".join(rows).encode() + b"\n"


def pipeline(stage: int) -> bytes:
    """A stage of two, with two microbatches: F0 F1 B0 B1."""
    names = ("fwd_start", "fwd_end", "bwd_start", "bwd_end")
    times = (
        [[10, 30], [29, 49], [100, 160], [150, 210]] if stage == 0 else [[30, 110], [50, 120], [50, 120], [100, 170]]
    )
    one = dict(zip(names, times, strict=True)) | {"total": 215.0, "memory": 1.5}
    return as_json({"1": one, "2": one, "3": one})


# ---- packs, models, graphs, arrays


PACK = {
    "presage_pack": 2, "gpu": "NVIDIA Made-Up", "sms": 100, "memory_bytes": 1 << 36, "l2_bytes": 1 << 25,
    "power_limit_W": 500.0, "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900, "driver": "580", "host": "a CPU",
    "python": "3.12.3", "date": "2026-01-02", "repeats": 4,
}  # fmt: skip


def pack_rows() -> bytes:
    """Draws of a sweep, a line each."""
    op = {
        "op": "aten::mm", "dims": [[8, 8], [8, 8]], "types": ["float", "float"], "strides": [[8, 1], [8, 1]],
        "concrete": ["", ""], "us": 10.0, "spread_us": 0.5, "n": 4, "kernels": [["gemm", 10.0]], "cold_us": 12.0,
    }  # fmt: skip
    rows = [{"p": {"m": m}, "mhz": 1980, "ops": [op]} for m in (1, 2)] + [{"p": {"m": 3}, "error": "out of memory"}]
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


@cache
def models() -> bytes:
    """A file of fitted kernel models with little in it."""
    from presage.costs.trees import Trees

    two = np.array([True, False, False])
    stump = {"feature": np.zeros(1, np.int16), "threshold": np.ones(1, np.float32), "value": np.ones(2, np.float32)}
    bits = {
        "nan_left": np.packbits(two[:1]),
        "splits": np.packbits(two),
        "base": np.float64(0),
        "features": np.int32(3),
    }
    about = {
        "version": 1, "gpu": "h200", "families": ["gemm"], "source": {"key": "h200"},
        "cache": {"kept": 1e6, "lost": 2e6, "read_weight": 0.5},
        "power": {"limit": 700.0, "base": 90.0, "per_byte": 1e-10, "per_worked_byte": 1e-10,
                  "per_flop": {"float32": 1e-12}, "slope": 1.0},
    }  # fmt: skip
    arrays = {f"{part}.gemm.{k}": v for part in ("time", "count") for k, v in (stump | bits).items()}
    assert Trees.from_arrays(arrays, "time.gemm").features == 3
    out = io.BytesIO()
    np.savez_compressed(out, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return out.getvalue()


@cache
def graph() -> bytes:
    from graph_sketches import training_step
    from presage.graph import save

    return save.to_bytes(training_step(layers=1))


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def indices() -> tuple[bytes, ...]:
    ids, lengths = np.arange(12) % 5, np.array([[2, 1, 3], [1, 1, 4]])
    named = {"a.indices": ids, "a.offsets": np.array([0, 4, 8]), "b": np.arange(6).reshape(3, 2)}
    return npz(indices=ids, lengths=lengths), npz(**named)


def array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(24).reshape(6, 4))
    return out.getvalue()


def tensors() -> bytes:
    import torch

    out = io.BytesIO()
    torch.save((torch.arange(12) % 5, torch.tensor([0, 4, 8, 12])), out)
    return out.getvalue()


# ---- logs and tables


def mlperf() -> bytes:
    steps = [[i, 0.5 + 0.01 * (i % 7)] for i in range(1, 41)]
    run = {"submitter": "a", "system": "b", "benchmark": "c", "run": 1, "steps": steps, "n_gpus": 8,
           "accelerator": "H100", "gpus_per_node": 8, "global_batch": 64,
           "validation": [{"samples": 640, "seconds": 3.0}]}  # fmt: skip
    means = {"submitter": "a", "system": "b", "benchmark": "c", "run": 2, "blocks": [[10.0, 0.5], [20.0, 0.6]]}
    return as_json({"runs": [run, means]})


def megatron() -> bytes:
    text = "  iteration {n:8d}/  500000 | elapsed time per iteration (ms): {t} | loss: 1.0 |\n"
    return "".join(text.format(i=i % 10, n=100 * (i + 1), t=510.5 + i) for i in range(12)).encode()


STEPS = b"run,step,step_time_ms,event\n" + b"".join(b"r1,%d,%d.5,\n" % (i, 500 + i % 5) for i in range(30))
FLEET = b"uuid,node,kern,perf_ms\n" + b"".join(b"g%d,n%d,gemm,%d.25\n" % (i % 9, i % 3, 10 + i % 4) for i in range(36))
LENGTHS = b"doc,length\n" + b"".join(b"%d,%d\n" % (i, 100 + 37 * i) for i in range(20))
TABLES = {
    "batch": 1024,
    "tables": [
        {"name": "a", "rows": 1000, "dim": 64, "pooling": 2.0, "alpha": 1.05},
        {"name": "b", "rows": 50, "dim": 32, "pooling": 1, "hist": [3, 2, 1], "lookups": 9, "distinct": 6, "top": 3},
        {"name": "c", "rows": 10, "dim": 16, "pooling": 1, "count": 2, "dtype": "float16"},
    ],
}
PLAN = {
    "kind": "sharding plan", "ranks": 2,
    "tables": {"a": {"sharding": "column_wise", "ranks": [0, 1]}, "b": {"sharding": "table_wise", "ranks": [1]},
               "c.0": {"sharding": "row_wise"}, "c.1": {"sharding": "data_parallel"}},
}  # fmt: skip
NOISE = b"""[spread.products]
rank = { value = 0.02, low = 0.01, high = 0.03, source = "some" }
own = 0.015

[common]
sd = 0.01

[stalls]
per_node_hour = 0.01
seconds = { lognormal = { median = 3.0, log_sd = 1.0 } }

[load]
empirical = [1.0, 2.0]

[sources]
"spread.attention" = "guessed"
"""
PUBLIC_TEXT = """source_key=megatron_sc21_t1 framework=Megatron-LM model=gpt-18B params_b=18.4 hidden=6144 layers=40
heads=48 kv_heads=48 ffn=24576 mlp_type=gelu vocab=51200 seq_len=2048 gpu=A100-80GB-SXM gpus_per_node=8 interconnect=x
n_gpus=256 tp=8 pp=1 vpp=1 dp=32 cp=1 ep= fsdp_zero=none micro_batch=8 global_batch=1024 precision=fp16 recompute=full
step_time_s=9.4 peak_mem_gib=60 moe_experts= moe_topk= moe_ffn= complete=yes source=x source_file=
tokens_per_s_per_gpu= tflops_per_gpu= mfu_pct= metric_reported=step_time_s flop_convention= step_time_s_derived=
derived_from= notes="""
PUBLIC = {k: v for k, _, v in (x.partition("=") for x in PUBLIC_TEXT.split())}


def public_runs() -> bytes:
    other = PUBLIC | {
        "source_key": "torchtitan",
        "framework": "torchtitan",
        "fsdp_zero": "fsdp",
        "tp": "1",
        "dp": "256",
    }
    rows = [PUBLIC, other, PUBLIC | {"moe_experts": "8", "moe_topk": "2", "moe_ffn": "4096", "ep": "8"}]
    return "\n".join([",".join(PUBLIC), *(",".join(r.values()) for r in rows)]).encode() + b"\n"


COLLECTIVES = b"""source,gpu,nodes,n_gpus,nccl,op,bytes,time_us,busbw_gbps,note
s,a100_sxm,1,8,2.27,all_gather,512,8.98,0.029,
s,h100_sxm,2,16,2.27,AllReduce,1048576,70.5,20.1,x
s,h100_sxm,1,8,2.27,all_reduce,1048576,40.5,20.1,x
"""
KERNELS = b"""framework,version,kernel,device,dtype,m,n,k,latency_ms
a,1,gemm,NVIDIA H200,bfloat16,4096,4096,4096,0.25
b,1,gemm,NVIDIA H200,bfloat16,4096,4096,4096,0.26
a,1,gemm,NVIDIA A100-SXM4-80GB,float16,128,512,1024,0.02
"""
TBE_TABLE = {"E": 1000, "D": 64, "L": 2, "alpha": 1.05, "hist": [3, 2], "lookups": 9, "distinct": 6, "top": 3}
TBE_GROUPS = {
    "calls": [{"gpu": "h200"}],
    "groups": [{"id": i, "kind": "random", "B": 1024, "opt": "sgd", "lengths": "fixed", "dtype": "float32",
                "tables": [TBE_TABLE], "fwd_ms": 0.1 + i, "bwd_ms": 0.2, "check_ms": 0.1} for i in range(3)],
    "repeats": [{"id": 0, "fwd_ms": 0.1, "bwd_ms": 0.2}],
}  # fmt: skip
TBE_TASKS = {
    "tasks": [{"task": 0, "N": 2, "B": 1024, "opt": "sgd", "lengths": "fixed", "dtype": "float32",
               "tables": [TBE_TABLE, TBE_TABLE], "placements": [
                   {"name": n, "assign": a, "fwd_ms": [0.1, 0.2], "bwd_ms": [0.2, 0.3]}
                   for n, a in (("x", [0, 1]), ("y", [1, 0]))]}],
}  # fmt: skip
CASE = {"iters": 3, "step_ms": 17.3, "per_step_ms": [17.8, 17.4, 17.2], "peak_alloc": 1460101120, "gpu_active_ms": 15.0}
MEASURED = {"platform": {"gpu": "NVIDIA H200"}, "cases": {"one": CASE, "two": {"a": CASE, "b": CASE}}}
SIDE = {"step_ms": 2.0, "gpu_active_ms": 1.0, "peak_bytes": 5, "kernels": 3}
PAIRS = {
    "tf32/a": {"edit": "tf32", "base": SIDE, "changed": SIDE},
    "tf32/b": {"edit": "tf32", "failed": "no"},
    "_a": {},
}
LABEL = {"model": "gpt2_large", "mode": "train", "seq_len": 1024, "batch": 1, "option": None, "num_layer": 36,
         "e2e_latency": 600.0, "fw_latency": 200.0, "bwall_latency": 400.0}  # fmt: skip
TEMPORAL = {
    "series": [{"name": "gemm", "start": 0.0, "end": 2.0, "ms": [1.6 + 0.01 * (i % 7) for i in range(80)]}],
    "smi": [[float(t) / 4, 1500 + t, 2619, 690.0, 60] for t in range(8)],
}
PUBLISHED = {
    "blocking_slowdown": 1.2, "step_t_nodelay": {"1": 4.0}, "step_t_noblk": {"1": 3.5},
    "blocking_decompose_by_stage": {"0": 1.1, "1": 1.0},
}  # fmt: skip
PREDICTED = {
    "step_ms": {"mean": 35.0, "p5": 33.0, "p50": 35.0, "p95": 37.0}, "gpu_active_ms": 34.0,
    "peak_memory_bytes": 12 << 30,
    "breakdown": {"matrix multiply": {"ms": 13.4, "share": 0.39}},
}  # fmt: skip
CODE = b"""CASES = {"one": (lambda device, n=1: (lambda: n), {"n": 2})}


def build(device, batch=8):
    return lambda: batch
"""
SCRIPT = b"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
TP=8
PP=${PP_SIZE:-2}
WORLD=$(($SLURM_NNODES * 8))
ARGS="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \\
    --micro-batch-size 1 --global-batch-size $(($WORLD / $TP * 4)) --bf16 --swiglu --padded-vocab-size 32000 \\
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 11008 --use-distributed-optimizer
"""


def packed(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)
