"""What a layer costs the host: parts add up, frameworks differ as they should, and Megatron's steps agree untuned."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from presage.configs.frameworks import Framework
from presage.costs.host_model import host_model
from presage.costs.layer_host import ExpertHost, LayerHost, eras, hosts_known, layer_host
from presage.errors import PresageError
from presage.traces.overheads import UNPROFILED

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = ExpertHost("alltoall", 8)
EAGER = ("megatron-2021", "megatron-core", "torch", "torch-gpt")


def whole(h: LayerHost) -> float:
    return h.forward + h.recompute + h.backward


def test_every_framework_and_era_has_costs() -> None:
    for name in hosts_known():
        for era in eras():
            for tp, split, experts, fused in ((1, False, None, True), (8, True, EXPERTS, False)):
                h = layer_host(name, era, tp, split, experts, fused)
                assert all(0 < getattr(h, f) < 0.02 for f in LayerHost.__slots__)
    assert Framework().host in hosts_known() and {"deepspeed", "graph", "compiled"} <= set(hosts_known())


def test_parts_add_up() -> None:
    for name in (*EAGER, "compiled"):
        h, call = layer_host(name), layer_host(name).collective
        split, joined = layer_host(name, tp=4, sequence_parallel=True), layer_host(name, tp=4)
        assert joined.forward == pytest.approx(h.forward + 2 * call) and split.forward > joined.forward
        assert split.backward - h.backward == pytest.approx(6 * call)
        assert h.recompute > h.forward and h.backward > h.forward
        assert layer_host(name, experts=EXPERTS).forward > h.forward + 2 * call
        slower = layer_host(name, "a100").forward / h.forward
        assert slower == pytest.approx(layer_host(name, "a100").send / h.send) and 0.9 < slower < 1.3


def test_frameworks_differ_as_they_launch() -> None:
    at = {name: layer_host(name) for name in hosts_known()}
    assert whole(at["graph"]) < 0.1 * whole(at["compiled"]) < 0.1 * whole(at["torch-gpt"]) < 0.1 * whole(at["torch"])
    assert at["deepspeed"] == at["megatron-2021"] == at["megatron-deepspeed"]
    for name in EAGER:
        assert layer_host(name, fused_attention=False).backward > at[name].backward
    assert layer_host("graph", tp=8, experts=EXPERTS) == at["graph"]


def test_experts_cost_the_host_by_dispatcher_and_by_their_number() -> None:
    def of(name: str = "alltoall", local: int = 8, overlapped: bool = False, graphs: tuple[str, ...] = ()) -> float:
        return whole(layer_host("megatron-core", experts=ExpertHost(name, local, overlapped), graphs=graphs))

    assert whole(layer_host("megatron-core")) < of("hybridep") < of("deepep") < of("alltoall")
    assert of(local=4) < of(local=16) and of() < of(overlapped=True)
    assert of(graphs=("attn", "moe_router", "moe_preprocess")) < of(graphs=("moe_router",)) < of()
    slower = layer_host("megatron-core", experts=ExpertHost("alltoall", 8, pace=2.0))
    usual, dense = layer_host("megatron-core", experts=EXPERTS), layer_host("megatron-core")
    assert usual.forward < slower.forward < 2 * usual.forward and slower.send == dense.send


def test_what_is_not_known_is_told() -> None:
    with pytest.raises(PresageError, match="no host costs for 'jax': choose from megatron-2021"):
        layer_host("jax")
    with pytest.raises(PresageError, match="unknown era 'k80' of hosts: choose from a100, h100"):
        layer_host("torch", "k80")


def test_terms_are_those_of_the_host_model() -> None:
    """The file's terms are sums of the fitted host model's: a new fit must be carried over."""
    from presage.costs.layer_host import host_facts

    us, t = host_model("h200").us, host_facts().terms
    assert t.kernel_forward == pytest.approx(us["leaf forward kernel"] + us["gap forward"], rel=0.02)
    assert t.kernel_backward == pytest.approx(us["leaf backward kernel"] + us["gap backward"], rel=0.02)
    assert t.plain == pytest.approx(us["leaf forward plain"] + us["gap forward"], rel=0.02)
    assert t.checkpoint < us["checkpoint begins"] + us["recomputation begins"], "frameworks' own have no hooks"
    assert t.optimizer == pytest.approx(us["step begins"] + us["optimizer begins"] + us["step end"], rel=0.02)
    assert t.threads == pytest.approx(us["to the autograd thread"] + us["to the main thread"], rel=0.02)


def test_a_captured_layer_costs_what_the_file_says() -> None:
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tools"))
    from count_layer_host import captured

    from presage.costs.layer_host import host_facts

    said, found = host_facts().captured.layers["gpt_jit"], captured("gpt_jit")
    assert found["forward"] == (pytest.approx(said.forward, rel=0.02), said.launches_forward)
    launches = pytest.approx(said.launches_backward, abs=1)  # as kernel models count them
    assert found["backward"] == (pytest.approx(said.backward, rel=0.02), launches)


@pytest.mark.parametrize(("tp", "within"), [(1, 0.2), (2, 0.2), (4, 0.25)])
def test_launch_bound_steps_of_megatron_agree(shared: Path, tp: int, within: float) -> None:
    """vTrain's rows of hidden 1024 with one sequence of 1,024 tokens wait for the host: they are sums of traces of one
    layer on one rank, recorded by a profiler, without recomputation (docs/runs.md). Milliseconds a layer and microbatch
    are the slope over layers. Nothing here was fitted on them."""
    with (shared / "runs/public_runs.csv").open(newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["source_key"] == "vtrain_single"]
    mine = [r for r in rows if (r["hidden"], r["tp"], r["pp"], r["micro_batch"]) == ("1024", str(tp), "1", "1")]
    batches = np.array([int(r["global_batch"]) / int(r["dp"]) for r in mine])
    terms = np.stack([np.array([int(r["layers"]) for r in mine]) * batches, batches, np.ones(len(mine))], axis=1)
    seconds = np.array([float(r["step_time_s"]) for r in mine])
    slope = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(mine)), rcond=None)[0][0]
    alone = layer_host("megatron-2021", "a100", fused_attention=False)
    assert (alone.forward + alone.backward) / UNPROFILED == pytest.approx(slope, rel=within)
