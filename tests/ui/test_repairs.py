"""Any model, cluster and number of GPUs gives an answer: the plan is repaired, what changed is said, and undone."""

import pytest

from presage.configs.check import problems
from presage.configs.models import preset_facts
from presage.hardware import platforms
from presage.search.plan_repair import repair
from presage.ui.knobs import KNOBS
from presage.ui.plans import Plan, first_plan, job_of_text, plan_of, text_of
from presage.ui.repairs import repair_plan, turn
from presage.ui.replies import turn_reply

ASKED = {"tokens": "15T", "days": 60, "noise": "production"}
NAMES = [k.name for k in KNOBS]
GPUS = (1, 2, 3, 7, 60, 96, 100, 997, 1000, 5000, 10_000, 16_383, 100_000, 720_720, 1_048_576, 2_000_000)


def wanted(**knobs: object) -> Plan:
    first = first_plan(None)
    return plan_of({**first.knobs, **knobs}, first.rest)


def legal(plan: Plan) -> bool:
    return not problems(job_of_text(text_of(plan), checked=True))  # raises where it is not


@pytest.mark.slow
def test_every_model_on_every_cluster_has_a_plan() -> None:
    for model in preset_facts():
        for where in platforms():
            plan, _ = repair_plan(wanted(model=model, platform=where.key), ("model", "platform"))
            assert legal(plan) and (plan.knobs["model"], plan.knobs["platform"]) == (model, where.key)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "deepseek-v3", "llama3.1-405b"])
def test_every_number_of_gpus_has_a_plan(model: str) -> None:
    for gpus in GPUS:
        plan, _ = repair_plan(wanted(model=model, gpus=gpus), ("gpus",))
        assert legal(plan) and plan.knobs["gpus"] == min(gpus, 1_048_576)


@pytest.mark.slow
def test_every_model_is_answered_from_the_first_state() -> None:
    first = first_plan(None)
    kept = turn_reply(first.knobs, first.rest, ASKED, None)["kept"]
    for model in preset_facts():
        reply = turn_reply({**first.knobs, "model": model}, first.rest, ASKED, kept)
        assert "measures" in reply and "wrong" not in reply, model


def test_a_legal_plan_stays_as_it_is() -> None:
    plan = wanted()
    assert repair_plan(plan) == (plan, ())
    job = job_of_text(text_of(plan))
    assert repair(job) is job


def test_what_was_chosen_stays_and_the_rest_follows() -> None:
    plan, changes = repair_plan(wanted(model="llama3-8b"), ("model",))
    assert [c.text() for c in changes] == ["chunks 8 → 4"]
    plan, changes = repair_plan(wanted(pp=16, virtual=16), ("pp",))
    assert plan.knobs["pp"] == 16 and {c.name for c in changes} == {"virtual"}
    plan, changes = repair_plan(wanted(global_batch=2047), ("global_batch",))
    assert plan.knobs["global_batch"] == 2047 and legal(plan)
    plan, _ = repair_plan(wanted(tp=3), ("tp",))  # no plan has it
    assert legal(plan) and plan.knobs["tp"] != 3


def test_precision_and_sequence_follow_the_gpu_and_the_model() -> None:
    plan, _ = repair_plan(wanted(model="gpt2", platform="dgx-2"))
    assert (plan.knobs["precision"], plan.knobs["sequence"]) == ("fp16", 1024)


def test_a_repaired_plan_fits_where_one_near_does() -> None:
    reply = turn_reply(wanted(model="deepseek-v3").knobs, first_plan(None).rest, ASKED, None)
    assert reply["fits"] and "ep 1 → " in reply["changes"]


def test_digits_typed_one_by_one_repair_the_plan_that_was_wanted() -> None:
    first = first_plan(None)
    _, kept = turn(first.knobs, first.rest, None)
    shown = first
    for gpus in (1, 16, 163, 1638, 16384):
        shown, kept = turn({**shown.knobs, "gpus": gpus}, first.rest, kept)
        assert kept["before"] == ({} if gpus == 16384 else first.knobs)
    assert shown == first and not kept["changes"]


def test_another_degree_is_turned_on_the_plan_that_is_shown() -> None:
    first = first_plan(None)
    _, kept = turn(first.knobs, first.rest, None)
    shown, kept = turn({**first.knobs, "model": "llama3-8b"}, first.rest, kept)
    assert shown.knobs["virtual"] == 4
    shown, kept = turn({**shown.knobs, "pp": 4}, first.rest, kept)
    assert (shown.knobs["pp"], shown.knobs["virtual"]) == (4, 4)


def test_undo_and_a_round_number_of_gpus_are_offered() -> None:
    first = first_plan(None)
    kept = turn_reply(first.knobs, first.rest, ASKED, None)["kept"]
    reply = turn_reply({**first.knobs, "gpus": 1000}, first.rest, ASKED, kept)
    offers = {o["label"]: o.get("values") for o in reply["offers"]}
    assert offers["Undo"] == [first.knobs[n] for n in NAMES]
    assert offers["Use 1,024 GPUs"] == [{**first.knobs, "gpus": 1024}[n] for n in NAMES]
    assert "Find the best plan" in offers  # it does not fit
    wrong = turn_reply({**first.knobs, "gpus": None}, first.rest, ASKED, reply["kept"])
    assert wrong["offers"] == [{"label": "Undo", "values": reply["values"]}]


def test_changes_with_which_a_plan_fits_are_offered_and_do() -> None:
    first = first_plan(None)
    reply = turn_reply({**first.knobs, "model": "grok1-314b", "platform": "dgx-h200"}, first.rest, ASKED, None)
    fitting = [o["values"] for o in reply["offers"] if o["label"].startswith("Fit with")]
    assert not reply["fits"] and fitting
    for values in fitting:
        again = turn_reply(dict(zip(NAMES, values, strict=True)), first.rest, ASKED, reply["kept"])
        assert again["fits"] and not again["changes"]


def test_a_described_model_gives_way_to_a_chosen_one() -> None:
    own = {"model": {"hidden": 1024, "layers": 12, "heads": 16, "vocab": 32000}, "cluster": {"gpu": "h100_sxm"}}
    plan = plan_of({**wanted().knobs, "model": "llama3-8b"}, own)
    assert "hidden" not in text_of(plan) and "h100_sxm" not in text_of(plan)


@pytest.mark.parametrize("kept", [None, 5, [], {}, {"shown": 3}, {"shown": {"tp": 8}, "wanted": {}, "before": {}}])
def test_what_a_page_sends_as_kept_may_be_anything(kept: object) -> None:
    first = first_plan(None)
    assert "measures" in turn_reply(first.knobs, first.rest, ASKED, kept)
