"""What a training framework does in a step of a recommendation model, as named options with their sources.

A framework is a set of defaults; a job file's [system] overrides single options.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from presage.errors import PresageError

EXCHANGES = ("flat", "two_tier")
GRADIENTS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class DlrmSystem:
    """Options of a step; see SOURCES for where each is described."""

    framework: str = "torchrec"
    cuda_graph: bool = False  # the step is one CUDA graph: no host time per op
    fused_dense: bool = (
        False  # bias and activation inside the GEMMs, one kernel for each cross layer's element-wise part
    )
    bottom_beside_exchange: bool = False  # lookups first, the bottom layers while pooled rows travel
    gradient: str = "fp32"  # what dense gradients are all-reduced in
    one_reduce: bool = False  # one all-reduce of dense gradients beside the tables' updates; else by part, as ready
    exchange: str = "flat"  # pooled rows by one all-to-all, or summed inside the node first, then between nodes
    replicate_GB: float = 0.0  # tables below this, with Adagrad's state, are on all ranks; 0: none (plan "hugectr")
    cache_load_factor: float = 1.0  # the share of rows in GPU memory; below 1 the tables are in the host's memory
    prefetch: bool = False  # rows that the cache lacks are fetched one batch ahead
    plan: str = "auto"  # where the job names none


SOURCES = {
    "cuda_graph": "HugeCTR: use_cuda_graph of CreateSolver, in MLPerf's train.py of v3.0 to v5.1",
    "fused_dense": "HugeCTR 3.1 release notes: fused GEMM + bias + ReLU forward, GEMM + dReLU + bias gradient backward",
    "bottom_beside_exchange": "HugeCTR: train_intra_iteration_overlap, order of src/pybind/model_pipeline.cpp",
    "gradient": "HugeCTR: use_mixed_precision all-reduces half-precision gradients",
    "one_reduce": "HugeCTR: grouped_all_reduce, after the bottom layers' backward (model_pipeline.cpp)",
    "exchange": "HugeCTR: CommunicationStrategy.Hierarchical with sharding plan hier_auto, in MLPerf's train.py",
    "replicate_GB": "MLPerf configs: DP_SHARDING_THRESHOLD 0.008 (one node), 0.0125 (more), none in v3.0",
    "cache_load_factor": "TorchRec: compute kernel fused_uvm_caching, CacheParams.load_factor; hot rows are kept",
    "prefetch": "TorchRec: PrefetchTrainPipelineSparseDist, prefetch_pipeline of CacheParams",
    "pipelined": "TorchRec: TrainPipelineSparseDist; HugeCTR: train_inter_iteration_overlap",
}
_HUGECTR = DlrmSystem(
    "hugectr", cuda_graph=True, fused_dense=True, bottom_beside_exchange=True, gradient="fp16", one_reduce=True,
    exchange="two_tier", replicate_GB=0.008, plan="hugectr",
)  # fmt: skip
FRAMEWORKS = {
    "torchrec": DlrmSystem(),
    "hugectr": _HUGECTR,
    "hugectr-23.04": replace(_HUGECTR, framework="hugectr-23.04", replicate_GB=0.0),
}


def dlrm_system(framework: str, options: dict[str, Any] | None = None) -> DlrmSystem:
    """A framework's defaults with some options replaced."""
    if framework not in FRAMEWORKS:
        raise PresageError(f"unknown framework {framework!r}: choose from {', '.join(FRAMEWORKS)}")
    base, given = FRAMEWORKS[framework], options or {}
    known = {f.name: type(getattr(base, f.name)) for f in fields(DlrmSystem) if f.name not in ("framework", "plan")}
    for name, value in given.items():
        if name not in known:
            raise PresageError(f"unknown option {name!r} of [system]: choose from {', '.join(known)}")
        kind = known[name]
        if not (isinstance(value, kind) or (kind is float and type(value) is int)) or (kind is int and value is True):
            raise PresageError(f"{name} of [system] is {value!r}: it should be a {kind.__name__}")
    for name, choices in (("exchange", EXCHANGES), ("gradient", GRADIENTS)):
        if given.get(name, choices[0]) not in choices:
            raise PresageError(f"{name} of [system] is {given[name]!r}: choose from {', '.join(choices)}")
    found = replace(base, **given)
    if not 0 < found.cache_load_factor <= 1:
        raise PresageError(f"cache_load_factor of [system] is {found.cache_load_factor}: a share of rows, 0 to 1")
    if not found.fused_dense and (found.gradient != "fp32" or found.one_reduce):
        raise PresageError("gradient and one_reduce of [system] need fused_dense = true: DDP sends fp32 in buckets")
    return found
