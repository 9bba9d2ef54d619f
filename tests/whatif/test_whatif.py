"""What-ifs: edits as text, before and after under the same luck, reasons by critical path, suggestions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import presage as ps
from graph_sketches import Sketch, training_step
from presage.capture.variants import AS_WRITTEN, Variant
from presage.costs.host_factors import HostFactors
from presage.errors import PresageError
from presage.graph import save
from presage.graph.builder import without
from presage.graph.graph import Graph
from presage.prediction.machine import machine
from presage.whatif import parse, parse_edits, suggestions, what_if
from presage.whatif.before_after import Range
from presage.whatif.edits import EDITS, EditKind, NotApplicable, cuda_graph, faster
from presage.whatif.scenario import Scenario, apply_edit
from presage.whatif.source import source_of
from presage.whatif.trial import EFFECT, Drawing, baseline_trial, critical_path, unmatched

WIDE = training_step(4, rows=8192, width=8192)  # its products fill the GPU
SMALL = training_step(20)  # the host sets its pace
DRAWS = 20


def asked(step: Any, edits: Any, **more: Any) -> ps.WhatIf:
    return what_if(step, edits, draws=DRAWS, **more)


def same(graph: Graph) -> Graph:
    return graph


def no_activations(graph: Graph) -> Graph:
    return without(graph, lambda op: op.name == "aten::relu")


def other_activations(graph: Graph) -> Graph:
    """As many ops, which the graph did not have before."""
    ops = tuple(replace(op, name="aten::gelu") if op.name == "aten::relu" else op for op in graph.ops)
    return replace(graph, ops=ops)


# ---- edits as text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("cuda_graph", ["cuda_graph"]),
        ("cuda_graphs, host=2", ["cuda_graph", "host=2"]),
        ("faster=mm:2,cuda_graph", ["faster=mm:2", "cuda_graph"]),
        ("faster=add{1,2}mm|a,b:2,gpu=a100_80gb", ["faster=add{1,2}mm|a,b:2", "gpu=a100_80gb"]),
        ("arg:sizes=[64, 32],batch=4", ["arg:sizes=[64, 32]", "batch=4"]),
    ],
)
def test_edits_are_read_from_text(text: str, read: list[str]) -> None:
    assert [a.text for a in parse(text)] == read


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cuda_grph", "did you mean cuda_graph"),
        ("cuda_graph,nonsense", "unknown edit 'nonsense'"),
        ("cuda_graph=3", "cuda_graph takes no value"),
        ("host=0", "a factor above 0"),
        ("host=fast", "a factor above 0"),
        ("host=nowhere.toml", "no such file"),
        ("gpu=", "gpu needs a name"),
        ("gpu=h2000", "no gpu 'h2000'"),
        ("batch=many", "a whole number above 0"),
        ("missing.py:edit", "no such file"),
    ],
)
def test_mistakes_in_edits_get_a_sentence(text: str, told: str) -> None:
    with pytest.raises(PresageError, match=told):
        parse(text)


def test_arguments_come_first_and_the_rest_in_its_order() -> None:
    assert [a.text for a in parse_edits(["cuda_graph", "batch=4", same])] == ["batch=4", "cuda_graph", "same"]


def test_a_function_of_a_file_is_an_edit(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    bodies = {"half": "graph", "wrong": "3", "broken": "graph.nothing"}
    file.write_text("".join(f"def {name}(graph):\n    return {body}\n" for name, body in bodies.items()))
    assert asked(SMALL, f"{file}:half").edits == (f"{file}:half",)
    with pytest.raises(PresageError, match="returns a Graph, and this one returned int"):
        asked(SMALL, f"{file}:wrong")
    with pytest.raises(PresageError, match=r"mine.py:6 AttributeError"):
        asked(SMALL, f"{file}:broken")


def test_an_edit_that_breaks_the_graph_is_told() -> None:
    def gone(graph: Graph) -> Graph:
        return replace(graph, storages=graph.storages[:-1])

    with pytest.raises(PresageError, match="gone made a graph that is not valid"):
        asked(SMALL, gone)


def test_an_edit_without_a_place_is_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="no_sync: nothing to change"):
        asked(SMALL, "no_sync")


# ---- the comparison


def test_no_change_is_no_change_in_every_draw() -> None:
    found = asked(SMALL, same)
    assert (found.speedup.p5, found.speedup.p50, found.speedup.p95) == (1.0, 1.0, 1.0)
    assert found.memory_change == 0 and found.saved == 0 and found.confidence == 0 and found.sureness == "high"
    assert found.step.before == ps.predict(SMALL, draws=DRAWS).step, "the base is the prediction itself"


def test_the_same_seed_gives_the_same_answer() -> None:
    assert asked(SMALL, "cuda_graph") == asked(SMALL, "cuda_graph")
    assert asked(SMALL, "cuda_graph", seed=1).speedup != asked(SMALL, "cuda_graph").speedup


def test_a_host_twice_as_fast_halves_a_step_of_the_host() -> None:
    found = asked(SMALL, "host=2")
    assert found.speedup.p50 == pytest.approx(2, rel=0.01)
    assert found.speedup.p95 / found.speedup.p5 < 1.02, "luck is common to both"
    assert found.step.before.p95 / found.step.before.p5 > 1.2
    assert asked(WIDE, "host=2").speedup.p95 == pytest.approx(1, abs=0.01)


def test_a_kernel_twice_as_fast_gains_what_it_took_where_the_gpu_is_the_limit() -> None:
    found = asked(WIDE, "faster=mm:2")
    base = ps.predict(WIDE, draws=DRAWS)
    products = next(p for p in base.families if p.name == "matrix multiply")
    assert found.edited.gpu_active == pytest.approx(base.gpu_active - products.gpu / 2, rel=0.03)  # power allows more
    assert found.saved == pytest.approx(products.gpu / 2, rel=0.1)
    assert found.limit.startswith("the GPU is the limit") and "GPU work" in found.because
    assert found.sureness == "high"


def test_a_faster_kernel_off_the_critical_path_gains_nothing_and_says_so() -> None:
    found = asked(SMALL, "faster=mm:4")
    assert found.speedup.p50 == 1.0
    assert found.limit.startswith("the host is the limit (100% of the critical path")
    assert "nothing gained" in found.because and "waits for the host" in found.because


def test_cuda_graphs_take_the_host_off_the_path() -> None:
    found = asked(SMALL, cuda_graph)
    assert found.edits == ("cuda_graph",)
    assert found.speedup.p50 > 3 and found.confidence == 1.0
    assert found.edited.host < 0.1 * found.base.host
    assert "less host work; then the GPU is the limit" in found.because


def spread(r: Range) -> float:
    return float(np.log(r.p95 / r.p5))


def by_effect(r: Range) -> float:
    """The spread that comes from the effect's own error alone."""
    return 2 * 1.645 * EFFECT * abs(float(np.log(r.p50)))


def test_new_ops_are_known_less_well_than_old_ones() -> None:
    gone, new = asked(WIDE, no_activations), asked(WIDE, other_activations)
    gone_is, gone_alone, new_is, new_alone = (f(w.speedup) for w in (gone, new) for f in (spread, by_effect))
    assert gone_is == pytest.approx(gone_alone, rel=0.2)
    assert new_is > 2 * new_alone
    assert unmatched("aab", "abc").tolist() == [False, True, False]


def test_without_a_model_an_edit_is_less_sure() -> None:
    def unknown(graph: Graph) -> Graph:
        ops = tuple(replace(op, name="mine::fused") if op.name == "aten::mm" else op for op in graph.ops)
        return replace(graph, ops=ops)

    found = asked(WIDE, unknown)
    assert found.modelled == 0.0 and found.sureness == "low"


def test_stages_add_up() -> None:
    found = asked(SMALL, [no_activations, "cuda_graph", "host=2"])
    assert [s.edit for s in found.stages] == ["no_activations", "cuda_graph", "host=2"]
    assert found.stages[-1].speedup == found.speedup and found.stages[-1].result == found.edited
    assert found.stages[0].result.launches == found.base.launches - 20
    assert not asked(SMALL, "cuda_graph").stages


def test_another_gpu_keeps_a_host_that_was_changed() -> None:
    scenario = Scenario(SMALL, machine("h200"))
    for edit in parse("host=2,gpu=b200"):
        scenario = apply_edit(scenario, edit)
    assert scenario.machine.kernels.gpu.key == "b200"
    assert scenario.machine.host.factors == HostFactors(0.5, 0.5, 0.5)
    launches = [int(op.kernels) for op in SMALL.ops]
    before, after = (where.host.costs(SMALL, launches).total for where in (machine("h200"), scenario.machine))
    assert after == pytest.approx(before / 2)


def test_what_does_not_fit_is_told() -> None:
    s = Sketch()
    x, y = s.tensor(1000, 1000), s.new(150_000, 100_000, dtype="float64")
    s.op("mm", [x, x], [y])
    assert asked(s.graph(), "gpu=b200").fits
    assert not asked(s.graph(), "gpu=a100_40gb").fits


@pytest.mark.parametrize("ops", [0, 1], ids=["none", "one"])
def test_steps_of_hardly_any_ops_can_be_asked(ops: int) -> None:
    s = Sketch()
    for _ in range(ops):
        s.op("mine::op", [s.tensor(4)], [s.new(4)], opaque=True)
    found = suggestions(s.graph(), draws=3)
    assert found.base.step.p50 > 0 and found.combination is None
    assert asked(s.graph(), [same, "host=2"]).speedup.p50 > 1


def test_a_made_edit_goes_by_its_makers_name() -> None:
    assert [a.text for a in parse_edits([faster("mm", 2.0), same])] == ["faster", "same"]


def test_a_step_of_several_streams_can_be_asked() -> None:
    """Draws of tasks on further streams take the GPU's luck."""
    mul = [i for i, op in enumerate(WIDE.ops) if op.name == "aten::relu"][:2]
    apart = replace(WIDE, ops=tuple(replace(op, stream="side") if i in mul else op for i, op in enumerate(WIDE.ops)))
    assert asked(apart, same).speedup.p50 == 1.0


# ---- the critical path


@pytest.mark.parametrize("graph", [SMALL, WIDE], ids=["host", "gpu"])
def test_the_path_is_the_step(graph: Graph) -> None:
    trial = baseline_trial(Scenario(graph, machine("h200")), Drawing(1, 6, 0))
    path = critical_path(trial.timed.built, sum(t.seconds for t in trial.timed.times))
    assert path.host + path.gpu + path.wait == pytest.approx(path.step, rel=1e-9)
    assert path.step == pytest.approx(trial.timed.built.usual(8), rel=1e-6)
    assert (path.host if graph is SMALL else path.gpu) > 0.99 * path.step
    assert path.idle >= 0 and path.on_gpu.sum() == pytest.approx(path.gpu)


def test_waits_for_the_gpu_are_turns_on_the_path() -> None:
    middling = training_step(6, rows=2048, width=1024)
    ops = tuple(replace(op, sync=True) if op.name == "aten::mm" else op for op in middling.ops)
    found = asked(replace(middling, ops=ops), "no_sync")
    assert found.limit.startswith("host and GPU are the limit by turns")
    assert found.speedup.p50 > 1.2 and found.because.startswith("the work stays, waits go; then the GPU is the limit")


# ---- other arguments


def tiny(_step: str, arguments: Mapping[str, Any], *, variant: Any = None) -> Graph:  # noqa: ARG001
    """Stands for a capture: so many rows as the batch says."""
    return training_step(4, rows=arguments.get("batch_size", 4096), width=4096)


def test_another_batch_is_captured_again_and_told_a_sample(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="loading a step's function needs torch")
    file = tmp_path / "step.py"
    file.write_text("def build(device, batch_size=4096, heads=2):\n    return None\n")
    found = asked(f"{file}:build", ["cuda_graph", "batch=8192"], capture=tiny)
    assert found.edits == ("batch=8192", "cuda_graph")
    assert found.work == 2 and found.unit == "sample"
    assert found.per_work.p50 == pytest.approx(2 * found.speedup.p50)
    assert 0.45 < found.speedup.p50 < 0.7
    assert "speedup_per_sample" in found.to_json()
    with pytest.raises(PresageError, match="takes no argument seq or seq_len; it takes batch_size, heads"):
        asked(f"{file}:build", "seq=128", capture=tiny)
    assert asked(f"{file}:build", "arg:heads=4", capture=tiny).unit == ""


def test_a_graph_alone_cannot_be_captured_again(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match="a graph alone cannot be captured again"):
        asked(SMALL, "batch=3")
    save.write(SMALL, tmp_path / "step.presage")
    graph, source = source_of(tmp_path / "step.presage", None, ps.step_graph)
    assert graph == SMALL and source.missing


def looped(_step: str, _arguments: Mapping[str, Any], *, variant: Variant = AS_WRITTEN) -> Graph:
    """Stands for a capture: as many layers as there are microbatches."""
    return replace(training_step(4 * variant.accumulate), variant=variant.changes())


def test_accumulation_counts_samples() -> None:
    found = asked("step.py:build", ["accumulate=2", "accumulate=2"], capture=looped)
    assert (found.work, found.unit) == (4.0, "sample")
    assert found.per_work.p50 == pytest.approx(4 * found.speedup.p50)


# ---- edits that capture again


CODE = """
import torch
from torch import nn

def build(device, batch=8, opt="loop"):
    m = nn.Sequential(nn.Linear(64, 64, device=device), nn.ReLU(), nn.Linear(64, 64, device=device))
    optimizer = torch.optim.Adam(m.parameters(), foreach=opt == "foreach")
    x = torch.randn(batch, 64, device=device)
    def step():
        optimizer.zero_grad()
        m(x).pow(2).mean().backward()
        optimizer.step()
    return step
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    pytest.importorskip("torch", reason="captures a step")
    (tmp_path / "train.py").write_text(CODE)
    return f"{tmp_path}/train.py:build"


def names(found: ps.WhatIf) -> list[str]:
    return [op.name for op in found.edited.graph.ops if op.kernels]


@pytest.mark.slow
def test_edits_of_the_capture_and_of_the_graph_go_together(code: str) -> None:
    found = asked(code, ["cuda_graph", "faster=aten::addmm:2", "fused_adam", "bf16"])
    graph = found.edited.graph
    assert names(found).count("aten::_fused_adam_") == 1
    assert {op.speed for op in graph.ops if op.name == "aten::addmm"} == {2.0}
    assert all(op.replayed for op in graph.ops)
    assert {t.dtype for op in graph.ops if op.name == "aten::addmm" for t in graph.inputs_of(op)} == {"bfloat16"}
    assert names(asked(code, ["fused_adam,bf16", "faster=aten::addmm:2,cuda_graph"])) == names(found)


def test_a_cuda_graph_has_a_capturable_optimizer(code: str) -> None:
    assert "aten::_foreach_div_" not in names(asked(code, "fused_adam"))
    ops = asked(code, "cuda_graph", arguments={"opt": "foreach"}).edited.graph.ops
    assert any("aten::_foreach_div_" in op.within for op in ops)


def test_a_graph_that_knows_its_code_is_captured_again(code: str, tmp_path: Path) -> None:
    graph = ps.step_graph(code, {"batch": 16})
    found = asked(graph, ps.edits.fused_adam)
    assert found.edits == ("fused_adam",) and "aten::_fused_adam_" in names(found)
    both = ps.edits.bf16(ps.edits.fused_adam(graph))
    assert both.variant == {"dtype": "bfloat16", "optimizer": "fused"}
    save.write(graph, tmp_path / "step.presage")
    assert names(asked(tmp_path / "step.presage", "fused_adam")) == names(found)


def test_a_graph_whose_code_is_gone_or_other_says_so(code: str, tmp_path: Path) -> None:
    graph = ps.step_graph(code)
    with pytest.raises(PresageError, match=r"not what .*train.py:build gives now"):
        asked(replace(graph, ops=graph.ops[:-1]), "bf16")
    (tmp_path / "train.py").unlink()
    with pytest.raises(PresageError, match=r"bf16 captures the step again: .*train.py:build, is not here"):
        asked(graph, "bf16")
    assert asked(graph, "cuda_graph").speedup.p50 > 1, "an edit of the graph needs no code"


def test_a_step_that_does_not_run_with_an_edit_is_told_with_the_line(code: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        CODE.replace("optimizer.zero_grad()", "assert m[0].weight.dtype is torch.float32")
    )
    with pytest.raises(PresageError, match=r"bf16: the step does not run with it: .*train.py:10"):
        asked(code, "bf16")


def test_edits_without_a_place_are_told_before_and_after_a_capture(code: str) -> None:
    with pytest.raises(NotApplicable, match="channels_last: nothing to change: no convolution"):
        asked(code, "channels_last")
    with pytest.raises(NotApplicable, match="checkpoint: nothing to change: no repeated blocks"):
        asked(code, "checkpoint")
    with pytest.raises(NotApplicable, match="bf16: nothing to change"):
        asked(code, "bf16,bf16")


def test_old_names_of_the_edits_still_work() -> None:
    from presage import edits
    from presage.graph import edits as old

    assert ps.edits is edits and edits.scale is not None
    with pytest.warns(DeprecationWarning, match="presage.edits"):
        assert old.cuda_graph is edits.cuda_graph


# ---- suggestions


def test_suggestions_come_best_first_and_say_what_has_no_place() -> None:
    found = suggestions(SMALL, draws=DRAWS)
    gains = [(w.work == 1, w.per_work.p50) for w in found.tried]
    assert gains == sorted(gains, reverse=True), "steps of other sizes come last"
    assert found.tried[0].edits == ("cuda_graph",)
    assert "no_sync" in {edit for edit, _ in found.not_applicable}
    assert all(why for _, why in found.not_applicable)
    assert all(w.speedup.p50 == 1.0 and "nothing gained" in w.because for w in found.supposed)
    assert ps.suggest(SMALL, draws=DRAWS)[0].edits == ("cuda_graph",)


def test_the_best_edits_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without activations alone the host gains a little; once it is off the path, the GPU does."""
    for name in [n for n in EDITS if n != "cuda_graph"]:
        monkeypatch.delitem(EDITS, name)
    monkeypatch.setitem(EDITS, "bare", EditKind("bare", "", lambda _: no_activations, caution="other results"))
    monkeypatch.setitem(EDITS, "same", EditKind("same", "", lambda _: same))
    found = suggestions(SMALL, draws=DRAWS, gpus=["b200"])
    assert {w.edits[0] for w in found.tried} == {"cuda_graph", "bare", "same", "gpu=b200"}
    assert found.combination is not None
    assert found.combination.edits == ("bare", "cuda_graph"), "what takes the step as it is comes last"
    assert found.combination.cautions[0] == "other results"
    assert found.combination.speedup.p50 > found.tried[0].speedup.p50
    alone = suggestions(SMALL, draws=DRAWS, combine=1)
    assert alone.combination is None


def test_an_edit_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_graph: Graph) -> Graph:
        raise KeyError("no such op")

    monkeypatch.setitem(EDITS, "broken", EditKind("broken", "", lambda _: broken))
    found = suggestions(SMALL, draws=DRAWS, combine=1)
    assert any(edit == "broken" and "KeyError" in why for edit, why in found.not_applicable)
    assert found.tried


def test_json_has_what_was_asked_for() -> None:
    value = asked(SMALL, ["cuda_graph", "host=2"]).to_json()
    assert value["kind"] == "whatif" and value["edits"] == ["cuda_graph", "host=2"]
    assert value["base"]["kind"] == value["edited"]["kind"] == "prediction"
    assert value["speedup"]["p5"] <= value["speedup"]["p50"] <= value["speedup"]["p95"]
    assert value["saved_ms"] == pytest.approx(value["base"]["step_ms"]["p50"] - value["edited"]["step_ms"]["p50"])
    assert len(value["steps"]) == 2 and 0 <= value["confidence"] <= 1
    assert np.isfinite(value["memory_change_bytes"])
