"""The host model: units and terms of a graph, the fit, the file, and what it says of measured steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graph_sketches import Sketch, training_step
from presage.costs.host_model import HostModel, host_model, read
from presage.costs.host_units import ENGINE, host_terms, host_units
from presage.errors import InputError, PresageError
from presage.graph.graph import Graph
from presage_fit.host import HostRow, fit, host_model_toml, host_us, own_terms, paces, profiler_cost, rows, share_found
from presage_validation.workloads import measured_cases

ROOT = Path(__file__).resolve().parents[2]
VARIED = ROOT / "data" / "h200_varied"


def graph_of(*ops: tuple[str, dict]) -> Graph:
    s = Sketch()
    for name, more in ops:
        s.op(name, [s.tensor(4, 4)], [s.new(4, 4)], **more)
    return s.graph()


def linear(**more: object) -> list[tuple[str, dict]]:
    inner = {"within": ("aten::linear", "aten::t", "aten::transpose"), "kernels": False}
    return [("as_strided", {**inner, **more}), ("addmm", {"within": ("aten::linear",), **more})]


def test_ops_inside_one_op_are_one_unit_and_a_second_call_is_another() -> None:
    found = host_units(graph_of(*linear(), *linear(), ("relu", {}), ("relu", {})))
    assert [(u.name, len(u.ops)) for u in found] == [
        ("aten::linear", 2),
        ("aten::linear", 2),
        ("aten::relu", 1),
        ("aten::relu", 1),
    ]


def node(name: str, sequence: int, *inner: str) -> dict:
    return {"phase": "backward", "within": (ENGINE + name, name, *inner), "sequence": sequence}


def test_a_backward_node_is_a_unit_and_each_gradient_another() -> None:
    accumulate = node("torch::autograd::AccumulateGrad", -1)
    found = host_units(
        graph_of(("mm", node("MmBackward0", 7)), ("mm", node("MmBackward0", 7)), ("mm", node("MmBackward0", 5)))
    )
    assert [len(u.ops) for u in found] == [2, 1]
    assert len(host_units(graph_of(("detach", accumulate), ("detach", accumulate)))) == 2


def keys_of(graph: Graph) -> dict[str, float]:
    out: dict[str, float] = {}
    for _, before, own in host_terms(graph, host_units(graph)):
        for key, times in [*before, *own]:
            out[key] = out.get(key, 0.0) + times
    return out


def test_what_a_checkpoint_recomputes_is_forward_code_on_the_backward_thread() -> None:
    forward = [("mm", {"sequence": 1, "module": "a"}), ("relu", {"sequence": 2, "module": "a"})]
    again = [("mm", {**node("ReluBackward0", 3), "module": "a"}), ("relu", {**node("ReluBackward0", 4), "module": "a"})]
    backward = [("threshold_backward", node("ReluBackward0", 2)), ("mm", node("MmBackward0", 1))]
    found = keys_of(graph_of(*forward, *again, *backward))
    assert found["leaf forward kernel"] == 4
    assert found["leaf backward kernel"] == 2
    assert found["recomputation begins"] == found["checkpoint begins"] == 1
    assert len(host_units(graph_of(*forward, *again, *backward))) == 4  # two forward, two nodes


def test_backward_nodes_that_run_nothing_are_counted() -> None:
    forward = [("mm", {"sequence": 1}), ("add", {"sequence": 2}), ("add", {"sequence": 3}), ("relu", {"sequence": 4})]
    backward = [("threshold_backward", node("ReluBackward0", 4)), ("mm", node("MmBackward0", 1))]
    assert keys_of(graph_of(*forward, *backward))["empty backward node"] == 2


def test_every_op_has_its_terms_once() -> None:
    graph = training_step(4)
    found = keys_of(graph)
    assert sum(v for k, v in found.items() if k.startswith("leaf") and ": " not in k) == len(graph.ops)
    assert [i for i, *_ in host_terms(graph, host_units(graph))] == list(range(len(graph.ops)))


@pytest.fixture(scope="module")
def model() -> HostModel:
    return host_model("h200")


def test_parts_of_an_op_add_up(model: HostModel) -> None:
    graph = training_step(4)
    one = model.costs(graph, [1] * len(graph.ops))
    many = model.costs(graph, [5] * len(graph.ops))
    for costs in (one, many):
        parts = (costs.t1, costs.t2, costs.t3, costs.t4, costs.t5)
        assert all((p >= 0).all() for p in parts)
        assert costs.total == pytest.approx(sum(p.sum() for p in parts) + costs.end)
    assert (one.t5 == 0).all()
    assert (many.t5 > 0).all()
    assert (many.seconds > one.seconds).all()
    assert (model.costs(graph, [0] * len(graph.ops)).t4 == 0).all()


def test_an_op_never_seen_costs_as_its_class_and_is_told(model: HostModel) -> None:
    known, new = graph_of(("mm", {})), graph_of(("an_op_nobody_has", {}))
    costs = model.costs(new, [1])
    assert costs.unknown == ("aten::an_op_nobody_has",)
    assert model.costs(known, [1]).unknown == ()
    assert costs.t2.sum() + costs.t3.sum() + costs.t4.sum() == pytest.approx(model.us["leaf forward kernel"] * 1e-6)


def test_more_tensors_in_a_list_cost_more(model: HostModel) -> None:
    def step(tensors: int) -> Graph:
        s = Sketch()
        some = [s.tensor(4) for _ in range(tensors)]
        s.op("_foreach_add_", [some, 1], [], "optimizer")
        return s.graph()

    assert model.costs(step(40), [1]).total > model.costs(step(4), [1]).total


def test_the_file_comes_back_as_it_was(model: HostModel, tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text(host_model_toml(model))
    again = read(path)
    assert again == model
    assert host_model_toml(again) == host_model_toml(model)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 9", "version"),
        ("[pace]", "[pice]", "pice"),
        ("run_sd", "run_sad", "run_sad"),
        ('"gap forward" = ', '"gap forward" = x', "TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_field(model: HostModel, tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "host.toml"
    path.write_text(host_model_toml(model).replace(old, new))
    with pytest.raises(InputError, match=said):
        read(path)


def test_a_gpu_without_a_host_model_is_told() -> None:
    with pytest.raises(PresageError, match="no host model of 'b300'"):
        host_model("b300")


TRUTH = {"gap forward": 4.0, "leaf forward kernel": 20.0, "gap backward": 3.0, "leaf backward kernel": 25.0}
COST = 2.0


def step_of(rng: np.random.Generator, main: float, autograd: float, count: int = 60) -> list[HostRow]:
    """Rows of a step at these paces: gaps and ops of both threads, some of a name that takes 10 us more."""
    out = []
    for thread, where, pace in (("main", "forward", main), ("autograd", "backward", autograd)):
        for _ in range(count):
            slow = rng.random() < 0.3
            us = pace * (TRUTH[f"leaf {where} kernel"] + 10 * slow + 3 * COST)
            name = f"leaf {where} kernel: aten::{'slow' if slow else 'quick'}"
            noise = 1 + 0.1 * rng.standard_normal(2)
            out.append(HostRow(thread, pace * (TRUTH[f"gap {where}"] + COST) * noise[0], 1, {f"gap {where}": 1.0}))
            out.append(HostRow(thread, us * noise[1], 3, {f"leaf {where} kernel": 1.0, name: 1.0}))
    return out


@pytest.fixture(scope="module")
def steps() -> dict[str, list[HostRow]]:
    rng = np.random.default_rng(1)
    pairs = [(1.0, 1.0), (1.5, 0.8), (0.7, 1.3), (1.0, 1.0), (2.0, 0.5), (0.5, 2.0)]
    return {f"case {i}": step_of(rng, *p) for i, p in enumerate(pairs)}


def test_the_fit_finds_terms_and_paces(steps: dict[str, list[HostRow]]) -> None:
    found = fit(steps, COST)
    for where in ("forward", "backward"):
        assert found.us[f"gap {where}"] == pytest.approx(TRUTH[f"gap {where}"], rel=0.15)
        slow, quick = (
            found.us[f"leaf {where} kernel"] + found.us[f"leaf {where} kernel: aten::{n}"] for n in ("slow", "quick")
        )
        assert slow == pytest.approx(TRUTH[f"leaf {where} kernel"] + 10, rel=0.15)  # a name is held to its class
        assert quick == pytest.approx(TRUTH[f"leaf {where} kernel"], rel=0.08)
        assert slow > quick + 5
    assert found.paces["case 4"].main / found.paces["case 0"].main == pytest.approx(2.0, rel=0.05)
    assert found.paces["case 4"].autograd / found.paces["case 0"].autograd == pytest.approx(0.5, rel=0.05)


def test_unprofiled_steps_tell_the_profilers_cost(steps: dict[str, list[HostRow]]) -> None:
    unprofiled = {name: 60 * (sum(TRUTH.values()) + 2 * 0.3 * 10) for name in steps}
    assert profiler_cost(steps, unprofiled) == pytest.approx(COST, abs=0.3)


def test_one_trace_moves_the_terms_to_its_own(steps: dict[str, list[HostRow]]) -> None:
    shared = fit(steps, COST).us
    mine = [replace(r, us=r.us + 40.0 * ("leaf forward kernel: aten::slow" in r.terms)) for r in steps["case 4"]]
    own = own_terms(mine, shared, COST)
    grown = {k: own.us[k] - shared[k] for k in shared}
    assert max(grown, key=lambda k: grown[k]) == "leaf forward kernel: aten::slow"
    assert own.paces.main > paces(steps["case 4"], shared, COST).main
    seen = sum(r.us - COST * own.paces.main * r.events for r in mine if r.thread == "main")
    assert own.paces.main * host_us(mine, own.us)["main"] == pytest.approx(seen, rel=0.1)


@pytest.fixture(scope="module")
def traced() -> tuple[Graph, list[HostRow], float]:
    """A captured step beside its trace: the graph, the rows, and the step's microseconds less waits."""
    from presage.capture import capture, load_cases
    from presage.traces import kineto
    from presage_fit.host import traced_units

    graph = capture(load_cases(ROOT / "workloads" / "varied.py")["autoencoder"], source="autoencoder")
    trace = kineto.read(VARIED / "autoencoder.json.gz")
    step = trace.steps[-1]
    assert share_found(graph, trace, step) > 0.95
    waited = sum(u.waited for u in traced_units(trace, step))
    return graph, rows(graph, trace, step), (step.end - step.start - waited) * 1e-3


def test_every_nanosecond_and_every_op_of_a_traced_step_is_in_one_row(
    traced: tuple[Graph, list[HostRow], float],
) -> None:
    graph, found, us = traced
    assert sum(r.us for r in found) == pytest.approx(us, abs=0.01)
    ops = sum(v for r in found for k, v in r.terms.items() if k.startswith("leaf") and ": " not in k)
    assert ops == len(graph.ops)


def test_the_shipped_model_knows_a_traced_step(model: HostModel, traced: tuple[Graph, list[HostRow], float]) -> None:
    _, found, _ = traced
    p = paces(found, model.us, model.fitted.profiler_us_per_event)
    assert 0.6 < p.main < 1.6
    assert 0.6 < p.autograd < 1.6
    measured = measured_cases(VARIED / "measured.json")["autoencoder"][0]["step_ms"]
    assert sum(host_us(found, model.us).values()) * 1e-3 == pytest.approx(measured, rel=0.3)


def test_what_the_model_was_fitted_on_is_in_its_file(model: HostModel) -> None:
    about = model.fitted
    assert about.gpu == "NVIDIA H200"
    assert about.traces >= 40
    assert about.left_out_error < 0.13  # each step told from the other traces
    assert 0.05 < model.pace.run_sd < 0.3
    assert 1.0 < model.calls.kernel_gap_us < 2.0
