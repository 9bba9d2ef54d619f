"""Recommendation jobs whose ranks were all traced: device and step times predicted beside the measured ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from presage.costs.host_model import host_model
from presage.costs.lookups.captured import lookup_seconds
from presage.errors import InputError
from presage.hardware import gpu
from presage.traces.replay import measured_steps, replay_of
from presage.traces.trace_graph import trace_graphs
from presage.traces.trace_set import read_run
from presage_validation.traced_jobs import score_traced_jobs, together_seconds


def test_torchrecs_golden_training_is_predicted_with_nothing_measured(shared: Path) -> None:
    result = score_traced_jobs([shared / "traces" / "torchrec_dlrm_4xv100"])
    found = result.metrics()
    assert found["device"].n == 24 and found["device"].mape < 0.08 and found["device"].max < 0.12
    assert found["step_delayed"].n == 6 and found["step_delayed"].mape < 0.12 and found["step_delayed"].max < 0.16
    assert found["step_allocating"].n == 6 and found["step_allocating"].max < 0.12  # cudaMalloc's time is given
    assert result.rates["steps_in_interval"] == 1.0
    assert [s.row for s in result.skipped] == ["plain_2gpu"]


@pytest.mark.slow
def test_eight_ranks_are_predicted_from_the_trace_of_one(shared: Path) -> None:
    found = score_traced_jobs([shared / "traces" / "dlrm_8xv100"]).metrics()
    assert found["step_learned"].n == 8 and found["step_learned"].mape < 0.12 and found["step_learned"].max < 0.12
    assert found["device_learned"].n == 56 and found["device_learned"].mape < 0.12
    assert found["step"].max < 0.20  # nothing measured of the machine
    assert -0.30 < found["device"].bias < -0.15  # too short, and so the page has it


def test_ranks_begun_together_do_not_wait_for_late_windows(shared: Path) -> None:
    replay = replay_of(read_run(sorted((shared / "traces" / "dlrm_8xv100").glob("kineto_*.json.gz"))))
    apart = [measured_steps(replay, place)[-1].seconds for place in range(8)]
    together = together_seconds(replay)
    assert max(apart) > 19e-3 and max(together) < 15e-3
    assert max(together) - min(together) < 2e-3 < max(apart) - min(apart)


def test_lookups_of_an_execution_trace_are_priced_by_the_embedding_model(shared: Path) -> None:
    """Both groups of a rank, forward and backward; the trace shows no op for the kernels of the backward."""
    (graph,) = trace_graphs(shared / "traces" / "dlrm_8xv100" / "et_0.json.gz")
    found = lookup_seconds(graph, gpu("v100_32gb"))
    names = [graph.ops[i].name for i in found]
    assert sum("codegen_lookup" in n for n in names) == sum("SplitLookupFunction" in n for n in names) == 2
    for place, seconds in found.items():
        op = graph.ops[place]
        assert 5e-6 < seconds < 100e-6
        if "SplitLookupFunction" in op.name:
            assert op.cost is not None and op.cost.launches == 8


def test_a_profiler_slows_a_host_by_its_events() -> None:
    plain = host_model()
    beside = plain.profiled()
    each = plain.fitted.profiler_us_per_event
    assert beside.us["leaf forward kernel"] == pytest.approx(plain.us["leaf forward kernel"] + 2 * each)
    assert beside.us["leaf forward plain"] == pytest.approx(plain.us["leaf forward plain"] + each)
    assert beside.us["step begins"] == plain.us["step begins"]
    assert all(beside.us[k] == v for k, v in plain.us.items() if ": " in k)


def test_a_folder_without_jobs_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no job with an execution trace"):
        score_traced_jobs([tmp_path])
    with pytest.raises(InputError, match="is no folder of traces"):
        score_traced_jobs([tmp_path / "none"])
