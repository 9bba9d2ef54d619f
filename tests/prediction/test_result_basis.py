"""A result carries what it was computed from: nothing is simulated or profiled twice."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from presage.graph import save
from presage.memory import step_memory
from presage.prediction import step
from presage.prediction.api import predict
from presage.report.html import render_page
from presage.report.predict_answer import predict_answer
from presage.traces.perfetto import timeline_trace

GPT = Path(__file__).parents[1] / "report" / "gpt.presage"


def test_trace_and_report_simulate_once_and_profile_memory_once() -> None:
    graph = save.read(GPT)
    with (
        patch.object(step, "simulate", wraps=step.simulate) as simulated,
        patch.object(step, "memory_profile", wraps=step_memory.memory_profile) as profiled,
        patch.object(import_module("presage.whatif.suggest"), "next_edits", return_value=()),
    ):
        result = predict(graph, draws=2)
        timeline_trace(result.timeline, {0: ""})
        render_page(predict_answer(result, page=True))
        timeline_trace(result.timeline, {0: ""})
    assert (simulated.call_count, profiled.call_count) == (1, 1)
