"""The seam between ops and seconds: a family that was not fitted, both kinds of models, jobs beside captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from presage.capture import capture  # noqa: E402
from presage.configs.frameworks import framework  # noqa: E402
from presage.configs.job import Job  # noqa: E402
from presage.configs.transformer import Transformer  # noqa: E402
from presage.costs.call import Call, Shape  # noqa: E402
from presage.costs.closed_form import ClosedFormKernels  # noqa: E402
from presage.costs.families import BY_OP, FAMILIES, KernelFamily, Law, register_family  # noqa: E402
from presage.costs.families.common import moved_law, plain_features  # noqa: E402
from presage.costs.host_model import host_model  # noqa: E402
from presage.costs.kernel_files import load  # noqa: E402
from presage.costs.kernel_model import KernelModel  # noqa: E402
from presage.costs.rates import Rates  # noqa: E402
from presage.graph.families import family  # noqa: E402
from presage.graph.graph import Graph, Op, Ref, Storage, Tensor  # noqa: E402
from presage.graph.work import flops  # noqa: E402
from presage.hardware import gpu, platform  # noqa: E402
from presage.parallel.plan import ParallelPlan  # noqa: E402
from presage.prediction.jobs.transformer_layer import layer_graph  # noqa: E402
from presage.prediction.machine import Machine, kernel_times  # noqa: E402
from presage.prediction.step import predict_step  # noqa: E402

ROWS, WIDTH = 4096, 1024


def rotary_law(call: Call, rates: Rates) -> Law:
    return moved_law(call.tensors[0].nbytes, call.tensors[0].nbytes, rates)


@pytest.fixture
def rotary() -> Iterator[KernelFamily]:
    """A family that no GPU's models know."""
    made = KernelFamily("rotary", frozenset({"toy::rotary"}), rotary_law, lambda c, law: plain_features(c, law, 0.0))
    register_family(made)
    yield made
    del FAMILIES["rotary"], BY_OP["toy::rotary"]


def toy_step() -> Graph:
    tensors = tuple(Tensor(i, i, (ROWS, WIDTH), (WIDTH, 1), "bfloat16") for i in range(2))
    op = Op("toy::rotary", "", (Ref(0),), (1,), "forward", "main")
    return Graph((op,), tensors, tuple(Storage(t.id, t.nbytes, "activation") for t in tensors), ())


@pytest.mark.parametrize("name", ["h200", "a100_80gb"])
def test_a_family_that_was_not_fitted_is_timed_by_its_law(rotary: KernelFamily, name: str) -> None:
    (found,) = load(name).op_times(toy_step())
    call = Call("toy::rotary", (Shape((ROWS, WIDTH), (WIDTH, 1), "bfloat16"),))
    assert found.seconds == rotary.law(call, Rates.of(gpu(name))).seconds
    assert found.source == "roofline" and found.launches == 1


@pytest.mark.usefixtures("rotary")
def test_a_step_with_such_an_op_is_predicted() -> None:
    where = Machine(load("h200"), host_model("h200"))
    found = predict_step(toy_step(), kernel_times(toy_step(), where), where.kernels.gpu, where.host, draws=2)
    assert found.step.mean > 0


# ---- a layer of a job beside a captured one


class Layer(nn.Module):
    """A Transformer layer as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (8, 128)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build(device: str) -> Callable[[], None]:
    layer = Layer().to(device, torch.bfloat16)
    x = torch.randn(2, 2048, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    return lambda: layer(x).sum().backward()


@pytest.fixture(scope="module")
def captured() -> Graph:
    return capture(build)


@pytest.fixture(scope="module")
def written() -> Graph:
    """The same layer of a job."""
    place = platform("dgx-h200")
    model = Transformer(WIDTH, 1, 8, 32000, 4 * WIDTH, 8, 128, activation="gelu")
    software = framework("megatron-core", place.gpu, gradient_bytes=2)
    job = Job(
        model, place, 1, parallel=ParallelPlan(), framework=software, sequence=2048, micro_batch=2, global_batch=2
    )
    return layer_graph(job, 0).graph


def by_family(graph: Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for op in graph.ops:
        found[family(op.name)] = found.get(family(op.name), 0) + flops(graph, op)
    return {name: found.get(name, 0) for name in ("matrix multiply", "attention")}


def test_a_jobs_layer_does_the_flops_of_a_captured_one(captured: Graph, written: Graph) -> None:
    assert by_family(written) == by_family(captured)


def seconds(model: KernelModel, graph: Graph, name: str) -> float:
    return sum(t.seconds for t in model.op_times(graph) if t.family == name)


def test_both_kinds_time_gemms_of_both_graphs_alike(captured: Graph, written: Graph) -> None:
    kinds: tuple[KernelModel, ...] = (load("h200"), ClosedFormKernels.of(gpu("h200")))
    times = [seconds(kind, graph, "matrix multiply") for kind in kinds for graph in (captured, written)]
    assert 0 < max(times) < 1.25 * min(times)


def test_closed_laws_time_a_captured_attention_as_the_fitted_model_does(captured: Graph, written: Graph) -> None:
    """An H200 runs cuDNN's kernels, which the laws call flash3."""
    closed = ClosedFormKernels.of(gpu("h200"), "flash3")
    assert seconds(closed, captured, "attention") == seconds(closed, written, "attention")
    assert seconds(closed, captured, "attention") == pytest.approx(
        seconds(load("h200"), captured, "attention"), rel=0.1
    )
