"""The page's search: ten plans, one search at a time, and one that is cut off shows what it has found."""

from dataclasses import replace

import pytest

from presage.search import SearchProgress, search
from presage.search.search_result import StopSearch
from presage.ui import searching
from presage.ui.knobs import InvalidPlan
from presage.ui.plans import first_plan, job_of_text, plan_of, predicted, text_of


def small(gpus: int = 8) -> str:
    first = first_plan(None)
    knobs = {"model": "llama3-8b", "gpus": gpus, "tp": 4, "pp": 2, "cp": 1, "virtual": 1, "global_batch": 8}
    return text_of(plan_of({**first.knobs, **knobs}, {}))


def test_a_search_that_is_cut_off_returns_its_best_so_far() -> None:
    def stop_when(what: str) -> object:
        def tell(now: SearchProgress) -> None:
            if now.what == what:
                raise StopSearch

        return tell

    job = job_of_text(small())
    whole = search(job, 8, top=3)
    for what in ("surveying", "pricing"):
        found = search(job, 8, top=3, tell=stop_when(what))  # type: ignore[arg-type]
        assert found.best and not found.complete and found.best[0].seconds >= whole.best[0].seconds
        assert found.counts.priced < whole.counts.priced


def test_a_page_stops_its_own_search_alone() -> None:
    text, told = small(), list[str]()

    def tell(now: SearchProgress) -> None:
        searching.stop("other")
        assert searching.UNDER_WAY.stopped == bool(told)
        told.append(searching.progress("mine")[1])
        assert searching.progress("other") == (0.0, "Searching …")
        with pytest.raises(InvalidPlan, match="another search"):
            searching.find_plans(text, "other")
        searching.stop("mine")
        searching.UNDER_WAY.tell(now)

    found = searching.find_plans(text, "mine", tell)
    assert not found.complete and found.best and len(told) == 2
    assert "cut off" in searching.found_text(found)
    assert searching.UNDER_WAY.page == "" and searching.find_plans(text, "other").complete


def test_rows_are_plans_that_controls_can_show() -> None:
    text = small()
    found = searching.find_plans(text, "")
    table = searching.plan_rows(text, found)
    assert len(table["rows"]) == len(table["plans"]) == 10 and table["head"][-4:] == ["step", "slower", "memory", "MFU"]
    from presage.ui.knobs import KNOBS

    for plan, own in zip(table["plans"], found.best, strict=True):
        made = plan_of(dict(zip((k.name for k in KNOBS), plan["values"], strict=True)), plan["rest"])
        assert predicted(text_of(made)).seconds == pytest.approx(own.seconds, rel=1e-9)
    assert searching.plan_scatter(replace(found, own=None)).data


def test_a_sweep_has_the_steps_of_the_page_and_stops_with_what_it_has() -> None:
    from presage.ui.answers import drawn_job
    from presage.ui.replies import sweep_reply

    text = small(16)
    lines = searching.sweep({"a": text}, "production", "mine", drawn_job)
    same, grows = lines
    assert [p.job.gpus for p in same.points] == [2, 4, 8, 16, 32, 64, 128] == [p.job.gpus for p in grows.points]
    assert same.points[3].step == drawn_job(text, "production").step == grows.points[3].step
    assert grows.points[-1].job.global_batch == 64 and same.points[4].job.global_batch == 8

    def stopping(plan: str, noise: str) -> object:
        searching.stop("mine")
        return drawn_job(plan, noise)

    cut = searching.sweep({"a": text, "b": small(8)}, "production", "mine", stopping)  # type: ignore[arg-type]
    assert [(line.name, len(line.points)) for line in cut] == [("plan A", 1)]
    reply = sweep_reply({"a": text}, {"tokens": "1T", "days": None, "noise": "production"})
    assert len(reply["rows"]) == 14 and len(reply["figure"]["data"]) == 8
    assert searching.progress("mine") == (0.0, "Searching …")
