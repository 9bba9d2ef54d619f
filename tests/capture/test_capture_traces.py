"""Captured steps against traces of the same steps on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs PyTorch: pip install torch")

from presage.capture import capture, load_cases
from presage.traces import kineto
from presage_validation.capture import captured_ops, leaf_ops


@pytest.mark.parametrize(
    "case", ["dlrm_default_b2048", "dlrm_big_b16384_l20_sparse", "vgg16_b32_tf32", "vit_b_b64_amp"]
)
def test_a_workload_is_captured_as_its_trace_shows_it(shared: Path, case: str) -> None:
    if case == "vit_b_b64_amp":
        pytest.importorskip("transformers", reason="this workload is a transformers model")
    trace = kineto.read(shared / "h200" / "traces" / f"{case}.json.gz")
    graph = capture(load_cases(shared / "h200" / "workloads.py")[case])
    theirs, ours = leaf_ops(trace, trace.steps[-1]), captured_ops(graph)
    for phase, ops in theirs.items():
        assert [str(o) for o in ours[phase]] == [str(o) for o in ops]
