"""RMS norms, captured as the H200 ran them in the calibration's sweep: one fused op each way."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

from presage.capture import capture  # noqa: E402
from presage.graph.dtypes import DTYPES  # noqa: E402
from presage.graph.graph import Graph, Ref  # noqa: E402

PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack" / "norm.jsonl.gz"


def captured(
    rows: int,
    columns: int,
    dtype: str,
    *,
    affine: bool = True,
    weights: str = "",
    amp: bool = False,
    turned: bool = False,
) -> Graph:
    def build(device: Any) -> Callable[[], Any]:
        kind, own = getattr(torch, dtype), getattr(torch, weights or dtype)
        norm = nn.RMSNorm(columns, elementwise_affine=affine, device=device, dtype=own)
        x = torch.randn((columns, rows) if turned else (rows, columns), device=device, dtype=kind).requires_grad_()
        grad = torch.randn(rows, columns, device=device, dtype=kind)

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                y = norm(x.t() if turned else x)
            y.backward(grad)

        return step

    return capture(build, warm_up=0)


def shown(graph: Graph) -> list[list[Any]]:
    """Ops that launch kernels with the shapes, strides and types of their tensors, and their lists of numbers."""
    out = []
    for op in (o for o in graph.ops if o.kernels):
        tensors = [graph.tensors[a.id] for a in op.inputs if isinstance(a, Ref)]
        lists = [a for a in op.inputs if isinstance(a, list)]
        out.append([op.name, [[list(t.shape), list(t.strides), t.dtype] for t in tensors], lists])
    return out


def measured(row: dict[str, Any]) -> list[list[Any]]:
    out = []
    for op in row["ops"]:
        parts = list(zip(op["dims"], op["strides"], op["types"], op["concrete"], strict=True))
        tensors = [[dims, strides, DTYPES[kind]] for dims, strides, kind, _ in parts if kind in DTYPES]
        lists = [ast.literal_eval(text) for _, _, kind, text in parts if kind == "ScalarList"]
        out.append([op["op"], tensors, lists])
    return out


def rows_of_the_pack() -> dict[str, dict[str, Any]]:
    """One row of each kind: type, with and without a weight, and whether the gradient is summed in two steps."""
    if not PACK.is_file():
        return {}
    with gzip.open(PACK, "rt") as lines:
        rows = [r for r in map(json.loads, lines) if r.get("p", {}).get("what") == "rms"]
    return {f"{r['p']['dtype']}-{'weight' if r['p']['affine'] else 'none'}-{len(r['ops'])}": r for r in rows}


@pytest.mark.parametrize(("kind", "row"), rows_of_the_pack().items())
def test_an_rms_norm_is_what_the_h200_ran(kind: str, row: dict[str, Any]) -> None:
    p = row["p"]
    assert shown(captured(p["rows"], p["channels"], p["dtype"], affine=p["affine"])) == measured(row), kind


def test_every_kind_of_row_is_there() -> None:
    if not PACK.is_file():
        pytest.skip(f"no pack at {PACK}")
    assert {k.rpartition("-")[0] for k in rows_of_the_pack()} >= {
        f"{d}-{w}" for d in ("float32", "bfloat16") for w in ("weight", "none")
    }


def test_its_memory_is_the_result_and_a_number_a_row() -> None:
    graph = captured(512, 64, "bfloat16")
    forward = next(o for o in graph.ops if o.name == "aten::_fused_rms_norm")
    out, kept = (graph.storages[graph.tensors[i].storage] for i in forward.outputs)
    assert (out.nbytes, kept.nbytes) == (512 * 64 * 2, 512 * 4)
    backward = next(i for i, o in enumerate(graph.ops) if o.name == "aten::_fused_rms_norm_backward")
    freed = {e.storage: e.op for e in graph.events if not e.allocates}
    assert freed[kept.id] > backward  # the backward reads it
    assert [graph.tensors[i].shape for i in graph.ops[backward].outputs] == [(512, 64), (64,)]


def test_an_input_that_is_not_contiguous_is_copied_first() -> None:
    names = [o.name for o in captured(32, 64, "float32", turned=True).ops if o.kernels]
    assert names[:2] == ["aten::_fused_rms_norm", "aten::copy_"]


@pytest.mark.parametrize("amp", [False, True])
def test_a_weight_of_another_type_is_taken_apart(amp: bool) -> None:
    """PyTorch 2.11 has the fused form only for a weight of the input's type, and its autocast leaves both alone."""
    graph = captured(32, 64, "bfloat16", weights="float32", amp=amp)
    forward = [o.name.removeprefix("aten::") for o in graph.ops if o.kernels and o.phase == "forward"]
    assert forward == ["copy_", "pow", "mean", "add_", "rsqrt", "mul", "mul", "copy_"]


def test_weights_of_an_input_without_a_gradient_are_summed_in_two_steps_too() -> None:
    def build(device: Any) -> Callable[[], Any]:
        norm, x = nn.LayerNorm(128, device=device), torch.randn(98077, 128, device=device)
        return lambda: norm(x).backward(x)

    graph = capture(build, warm_up=0)
    sums = [graph.inputs_of(o)[0].shape for o in graph.ops if o.name == "aten::sum" and o.kernels]
    assert sums == [(3065, 128), (3065, 128)]  # as the pack's row of this size has it
