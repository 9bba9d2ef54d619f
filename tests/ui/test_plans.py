"""Plans of the page: knobs become a job's text, which says the same as the job's own file; links carry it back."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import runner
from presage.cli import job
from presage.errors import InputError
from presage.prediction.jobs.job_prediction import predict_job
from presage.search import search
from presage.ui.knobs import KEPT, KNOBS, InvalidPlan
from presage.ui.plans import LONGEST, Plan, first_plan, plan_of, plan_of_text, predicted, text_of
from presage.ui.question import LONGEST_LINK, SharedPlans, make_link, pack_text, parse_question, read_link, unpack_text
from presage.ui.replies import best_reply, open_text, step_reply

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted((ROOT / "examples" / "jobs").glob("[!g]*.toml"))
ASKED = {"tokens": "15T", "days": 60, "noise": "production"}


def turned(**knobs: object) -> Plan:
    first = first_plan(None)
    return plan_of({**first.knobs, **knobs}, first.rest)


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_a_file_given_at_the_start_says_the_same_in_the_page(path: Path) -> None:
    text = text_of(first_plan(path))
    shown, own = predicted(text), predict_job(path)
    assert shown.seconds == pytest.approx(own.seconds, rel=1e-12)
    assert shown.memory.needed == pytest.approx(own.memory.needed, rel=1e-12)
    assert text_of(plan_of_text(text)) == text


def test_the_downloaded_text_says_the_same_to_presage_job(tmp_path: Path) -> None:
    reply = step_reply(turned(tp=4, pp=16, virtual=1, gpus=8192, micro_batch=2).knobs, {}, ASKED)
    (tmp_path / "plan.toml").write_text(reply["text"])
    told = json.loads(runner(job.command)(tmp_path / "plan.toml", "--json", "-"))
    shown = {m[0]: m[3] for m in reply["measures"]}
    assert shown["Memory"] == pytest.approx(told["memory"]["needed_bytes"], rel=1e-12)
    assert shown["Step"] * 1e3 == pytest.approx(told["step_ms"]["point"], rel=1e-12)


def test_each_knob_changes_the_text() -> None:
    other = {
        "model": "llama3-70b", "platform": "dgx-h200", "gpus": 4096, "tp": 4, "pp": 4, "cp": 1, "virtual": 4,
        "schedule": "zero-bubble", "sharding": "ZeRO-2", "global_batch": 4096, "micro_batch": 2, "sequence": 4096,
        "precision": "fp8", "recompute": "full", "framework": "megatron-core", "price": 3.0,
    }  # fmt: skip
    assert set(other) == {k.name for k in KNOBS} - {"ep"}
    first = text_of(turned())
    assert all(text_of(turned(**{name: value})) != first for name, value in other.items())


def test_experts_are_spread_only_where_there_are_some() -> None:
    assert "ep = " not in text_of(turned(ep=8))
    assert "ep = 8" in text_of(turned(model="deepseek-v3", ep=8, virtual=1, pp=1, cp=1))


def test_layers_that_do_not_come_out_even_are_dealt_out() -> None:
    text = text_of(turned(pp=4, virtual=1))
    assert "ends_as_layers = true" in text
    dealt = text_of(turned(pp=16, virtual=3, cp=1, global_batch=2048))
    assert "layers_as" in dealt
    assert predicted(text).seconds > 0 and predicted(dealt).seconds > 0


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"tp": 6}, "gpus"), ({"gpus": 1000}, "gpus"), ({"global_batch": 2047}, "global_batch"),
        ({"model": "no-such"}, "model"), ({"platform": "no-such"}, "platform"), ({"precision": "nvfp4"}, "precision"),
        ({"platform": "../../etc/passwd"}, "platform"), ({"framework": "/etc/passwd.toml"}, "framework"),
        ({"tp": None}, "tp"), ({"pp": float("nan")}, "pp"), ({"gpus": 10**30}, "gpus"), ({"gpus": -1}, "gpus"),
        ({"tp": "8"}, "tp"), ({"tp": True}, "tp"), ({"price": "free"}, "price"), ({"model": ["x"]}, "model"),
        ({"sharding": "all of it"}, "sharding"), ({"pp": 2048, "gpus": 262144}, "pp"),
        ({"sequence": 10**9}, "sequence"),
    ],
)  # fmt: skip
def test_a_wrong_knob_is_a_sentence_at_that_knob(knobs: dict[str, object], named: str) -> None:
    first = first_plan(None)
    reply = step_reply({**first.knobs, **knobs}, first.rest, ASKED)
    assert reply["wrong"] and "\n" not in reply["wrong"] and "Traceback" not in reply["wrong"]
    assert named in reply["knobs"]


@pytest.mark.parametrize(
    "text",
    [
        "= 1", "a = [", "x = 1", "[model]\npreset = 5", "[model]\nconfig = '/etc/passwd'", "arguments = 'run.sh'",
        "titan = '/etc/passwd'", "model = 3", "[cluster]\nplatform = '/tmp/x.toml'", "[cluster]\ngpu = 'x.TOML'",
        "framework = 'own.toml'", "[framework]\nname = 'a/b'", "[embeddings]\nx = 1", "a" * (LONGEST + 1),
        "[model]\npreset = 'gpt2'\n[model.experts]\nexperts = 'x'", "x = " + "[" * 5000, "x = " + "9" * 6000, "\0", "",
    ],
)  # fmt: skip
def test_a_bad_text_is_a_sentence(text: str) -> None:
    reply = open_text(text)
    assert set(reply) == {"wrong", "knobs"}
    assert 10 < len(reply["wrong"]) < 1500


def test_no_file_is_read_on_a_pages_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "config.json"
    secret.write_text('{"model_type": "llama"}')
    read: list[object] = []
    monkeypatch.setattr("presage.configs.models.read_config", lambda path: read.append(path))
    assert "reads no files" in open_text(f"[model]\nconfig = '{secret}'\n")["wrong"]
    rest = {"model": {"config": str(secret)}}
    assert "reads no files" in step_reply({**turned().knobs, "model": KEPT}, rest, ASKED)["wrong"]
    assert not read


def test_recommendation_jobs_are_turned_down_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "dlrm.toml"
    path.write_text("[embeddings]\n")
    with pytest.raises(InputError, match="presage dlrm"):
        first_plan(path)


@given(st.text(max_size=400), st.text(max_size=400), st.text(alphabet=string.printable, max_size=12))
def test_links_carry_any_text(a: str, b: str, tokens: str) -> None:
    a, b = (t.encode("utf-8", "ignore").decode() for t in (a, b))
    shared = SharedPlans({"a": a, "b": b}, {"tokens": tokens} if tokens else {})
    assert read_link(make_link(shared)) == shared


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_fragment_is_read_or_refused(fragment: str) -> None:
    try:
        read_link(fragment)
    except InvalidPlan as e:
        assert "link" in str(e)


def test_links_that_are_bombs_or_cut_off() -> None:
    with pytest.raises(InvalidPlan, match="unpacks"):
        unpack_text(pack_text("x" * 10_000_000))
    with pytest.raises(InvalidPlan, match="cut off"):
        unpack_text(pack_text("hello" * 100)[:-4])
    with pytest.raises(InvalidPlan, match="letters"):
        read_link("#a=" + "x" * LONGEST_LINK)


@settings(max_examples=30)
@given(
    st.sampled_from(["llama3-8b", "mixtral-8x7b", "gpt3-175b", "deepseek-v3"]), st.sampled_from([8, 64, 96, 1024]),
    st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 4, 64]),
    st.sampled_from(["none", "ZeRO-1", "ZeRO-3", "FSDP"]), st.sampled_from(["nemo", "torchtitan", "deepspeed"]),
)  # fmt: skip
def test_any_plan_is_answered_and_comes_back_from_its_text(
    model: str, gpus: int, tp: int, pp: int, cp: int, ep: int, sharding: str, framework: str
) -> None:
    knobs = {**turned().knobs, "model": model, "gpus": gpus, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "virtual": 1,
             "sharding": sharding, "framework": framework, "global_batch": 1024, "sequence": 2048}  # fmt: skip
    reply = step_reply(knobs, {}, ASKED)
    assert ("wrong" in reply) != ("measures" in reply)
    if "measures" in reply:
        again = plan_of_text(reply["text"])
        assert text_of(again) == reply["text"]
        assert predicted(text_of(again)).seconds > 0


def test_the_best_plan_is_no_slower_and_keeps_the_job() -> None:
    first = turned(model="llama3-8b", gpus=8, tp=4, pp=2, cp=1, virtual=1, global_batch=8, sequence=4096)
    text = text_of(first)
    found = best_reply(text)
    best = text_of(plan_of(dict(zip([k.name for k in KNOBS], found["knobs_set"], strict=True)), found["rest"]))
    assert 'preset = "llama3-8b"' in best and "optimizer" not in best
    own = search(predicted(text).job, 8, top=1).best[0]
    assert predicted(best).seconds == own.seconds and predicted(best).memory.needed == own.memory.needed
    assert predicted(best).seconds <= predicted(text).seconds
    assert predicted(best).memory.fits
    assert predicted(best).job.global_batch == 8


@pytest.mark.parametrize(
    "asked", [("", 1, "production"), ("15X", 1, "production"), (None, 1, "production"), ("15T", -1, "production"),
              ("15T", "soon", "production"), ("15T", float("inf"), "production"), ("15T", 1, "calm"), ("15T", 1, None)]
)  # fmt: skip
def test_what_cannot_be_asked_is_a_sentence(asked: tuple[object, object, object]) -> None:
    with pytest.raises(InvalidPlan):
        parse_question(*asked)
