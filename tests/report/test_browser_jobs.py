"""Pages of jobs, plans, runs and shards as a browser shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from job_answers import SMALL, job, plans, shards, surely, whole

from presage.prediction.jobs.job_prediction import predict_job
from presage.report.answer import Answer
from presage.report.job_answer import job_answer
from presage.report.plan_answer import plan_answer
from presage.report.run_answer import run_answer
from presage.report.shard_answer import shard_answer

pytestmark = pytest.mark.xdist_group("browser")
Looker = Callable[..., Any]
MIXED = """(() => {
  const chart = document.querySelector('#timeline-of-a-step .chart');
  const pair = chart.data.filter((t) => ['forward', 'backward'].includes(t.name));
  return pair.flatMap((t) => t.width.filter((w, i) => /% of this stretch/.test(t.hovertext[i])));
})()"""  # heights of the shares in columns of bars that are too thin to be drawn
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def seen_well(look: Looker, page: Answer, **how: Any) -> Any:
    """The page, drawn, with its answer, its first table, and nothing past the side of a narrow screen."""
    seen = look(page, **how)
    seen.well()
    assert seen.text("#answer") == page.headline
    assert seen.count(".chart") == sum(1 for s in page.sections if s.figure is not None)
    first = seen.tab.locator("main tbody").first.locator("tr").first.locator("td").all_text_contents()
    assert tuple(first) == page.sections[0].tables[0].rows[0]
    return seen


def narrow(seen: Any) -> None:
    seen.tab.set_viewport_size({"width": 480, "height": 800})
    seen.until(f"{WIDTH} <= 0")


def test_a_job(look: Looker) -> None:
    p = replace(job(), spread=surely())
    seen = seen_well(look, job_answer(p, 15e12, page=True))
    parts = sum(1 for seconds in p.step_parts.values() if seconds > 0)
    assert seen.count("#where-the-step-goes .bars path") == parts
    s = p.job_step.pipeline.schedule
    tasks = 2 * s.stages * s.virtual * s.microbatches + 2 * s.stages  # and what replicas send, and the optimizer
    assert tasks - 2 * s.stages <= seen.count("#timeline-of-a-step .bars path") <= tasks
    assert seen.count("#uncertainty .bars path") == 2 * int(400**0.5)
    assert seen.count("#uncertainty .scatterlayer .js-line") == 1
    assert seen.count("#memory .bars path") == len(p.memory.stages) * seen.count("#memory .legend .traces")
    assert seen.count("#roofline .scatterlayer .points path") >= 20
    narrow(seen)
    seen.tab.set_viewport_size({"width": 390, "height": 800})
    seen.until("document.querySelector('#timeline-of-a-step .chart')._fullLayout.width < 390")
    shares = seen(MIXED)
    assert sum(0.1 < share < 0.8 for share in shares) > 400  # both colours in a column, not one painted over the other


def test_a_plan_in_the_dark(look: Looker) -> None:
    found = plans()
    seen = seen_well(look, plan_answer(predict_job(SMALL).job, found), dark=True)
    front, others = len(found.front), 1 + (found.own is not None)
    drawn = seen.count("#time-against-memory .scatterlayer .points path")
    assert drawn >= len(found.cloud) + front + others
    narrow(seen)


def test_a_run(look: Looker) -> None:
    p = whole()
    seen = seen_well(look, run_answer(p))
    labels = seen.tab.locator("#how-long .annotation-text").all_text_contents()
    assert sum("deadline" in text for text in labels) == 1
    assert seen.count("#what-would-change-it .bars path") == 2 * len(p.changes)
    narrow(seen)


def test_a_shard(look: Looker) -> None:
    problem, found = shards()
    seen = seen_well(look, shard_answer(problem, found))
    assert seen.count("#load-of-the-ranks .bars path") == 2 * problem.ranks
    assert seen.count("#which-table-is-where .bars path") == sum(len(set(t.ranks)) or 4 for t in found.plan.tables)
    narrow(seen)
