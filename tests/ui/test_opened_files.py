"""Files opened on the page: jobs and models become plans, traces are explained, and what is neither is a sentence."""

import gzip
import json
from pathlib import Path

import pytest

from commands import runner
from presage.cli.trace import command as trace_command
from presage.traces.trace_set import DEMO
from presage.ui import dropped
from presage.ui.knobs import KEPT, KNOBS
from presage.ui.plans import first_plan, plan_of, plan_of_text, text_of
from presage.ui.question import (
    FIRST_QUESTION,
    SharedPlans,
    link_values,
    make_link,
    question_of,
    read_link,
    with_question,
)
from presage.ui.replies import open_files_reply, open_text, run_reply

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
FIRST = text_of(first_plan(None))


def opened(name: str, data: bytes | str) -> dict[str, object]:
    return open_files_reply([(name, data.encode() if isinstance(data, str) else data)], FIRST)


def knobs(reply: dict[str, object]) -> dict[str, object]:
    assert "wrong" not in reply, reply["wrong"]
    return dict(zip((k.name for k in KNOBS), reply["knobs_set"], strict=True))  # type: ignore[call-overload]


def test_a_models_config_goes_into_the_plan_that_is_shown() -> None:
    reply = opened("config.json", (JOBS / "mixtral" / "config.json").read_bytes())
    found = knobs(reply)
    assert found["model"] == KEPT and found["gpus"] == 16384 and found["platform"] == "dgx-h100"
    assert reply["rest"]["model"]["experts"]["experts"] == 8  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pretrain.sh", (JOBS / "pretrain_gpt.sh").read_text()),
        ("arguments.yaml", "num_layers: 4\nhidden_size: 512\nnum_attention_heads: 8\nseq_length: 1024\n"
         "vocab_size: 32000\nmicro_batch_size: 1\n"),
        ("arguments.json", json.dumps({"num-layers": 4, "hidden-size": 512, "num-attention-heads": 8,
                                       "seq-length": 1024, "vocab-size": 32000, "micro-batch-size": 1})),
        ("llama3_70b.toml", (JOBS / "torchtitan" / "llama3_70b.toml").read_text()),
    ],
)  # fmt: skip
def test_a_frameworks_own_settings_become_a_plan_on_the_cluster_that_is_shown(name: str, text: str) -> None:
    reply = opened(name, text)
    found = knobs(reply)
    assert found["platform"] == "dgx-h100" and found["price"] == 2.5
    assert text_of(plan_of(found, reply["rest"]))


def test_a_trace_gets_the_answer_of_presage_trace() -> None:
    reply = opened("demo.json.gz", DEMO.read_bytes())
    shown = json.dumps([reply["card"], reply["tables"]], default=lambda c: c.to_plotly_json())
    printed = runner(trace_command)("demo")
    first = next(line for line in printed.splitlines() if "/step" in line)
    assert first[:30] in shown and "Top kernels" in shown and "Top ops" in shown
    assert reply["figure"]["data"] and "<html" in str(reply["report"])  # type: ignore[index]


def test_an_execution_trace_is_counted() -> None:
    none: dict[str, list[int]] = {"values": [], "shapes": [], "types": []}
    nodes = [
        {"id": i, "name": "aten::mm", "ctrl_deps": 1, "inputs": none, "outputs": none, "attrs": []} for i in range(1, 4)
    ]
    reply = opened("et.json", json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}))
    assert "3 nodes" in json.dumps(reply["card"], default=lambda c: c.to_plotly_json())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("trace.json", b'{"traceEvents": [{"ph": "X", "cat"'), ("trace.json.gz", b"\x1f\x8bnot gzip"),
        ("empty.json", b""), ("picture.png", b"\x89PNG\xff"),
        ("notes.txt", "a shopping list"), ("model.py", "print()"), ("job.toml", "[model"), ("x.et", b"\0\1\2"),
        ("config.json", '{"model_type": "llama"}'), ("job.toml", "arguments = '/etc/passwd'"),
        ("../../up.json", "[1, {}]"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_these_is_one_sentence(name: str, data: bytes | str) -> None:
    reply = opened(name, data)
    said = str(reply.get("wrong"))
    assert 10 < len(said) < 500 and "\n" not in said and "/tmp" not in said


def test_a_trace_that_is_too_large_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "MOST_INSIDE", 100_000)
    data = gzip.compress(b'{"traceEvents": [' + b" " * 200_000 + b"]}")
    assert "use presage trace" in str(opened("trace.json.gz", data)["wrong"])
    monkeypatch.setattr(dropped, "MOST_FILES", 10)
    assert "opens files of up to" in str(opened("trace.json.gz", data)["wrong"])


# ---- what is asked of the run


ASKED = {**FIRST_QUESTION, "failures": "rsc1", "rate": 9, "restart": 600, "spares": 4, "interval": "30min"}


def test_the_text_and_the_link_carry_what_is_asked_of_the_run() -> None:
    text = with_question(FIRST, ASKED)
    assert "[run]" in text and text_of(plan_of_text(text)) == FIRST
    assert question_of(plan_of_text(text).run) == ASKED == open_text(text)["asked"]
    shared = read_link(make_link(SharedPlans({"a": FIRST}, {k: str(v) for k, v in ASKED.items()})))
    assert link_values(shared.asked) == ASKED


def test_the_run_on_the_page_is_that_of_presage_run(tmp_path: Path) -> None:
    from presage.cli import run

    first = first_plan(None)
    small = {"model": "llama3-8b", "gpus": 64, "tp": 2, "pp": 1, "cp": 1, "virtual": 1, "global_batch": 512}
    text = text_of(plan_of({**first.knobs, **small}, {}))
    asked = {**ASKED, "tokens": "200B", "days": 20}
    (tmp_path / "job.toml").write_text(with_question(text, asked))
    told = json.loads(runner(run.command)(tmp_path / "job.toml", "--draws", "500", "--json", "-"))
    shown = {m[0]: m for m in run_reply(text, asked)["measures"]}
    assert shown["Whole run"][3] == pytest.approx(told["days"]["p50"], rel=1e-12)
    assert shown["By the deadline"][3] == told["deadline"]["probability"]
    assert "4 spares" in shown["Goodput"][2] and "every 30 min" in shown["Goodput"][2]
    usual = {m[0]: m for m in run_reply(text, {**FIRST_QUESTION, "tokens": "200B"})["measures"]}
    assert usual["Goodput"][3] > shown["Goodput"][3], "a higher rate and longer restarts cost time"


@pytest.mark.parametrize(
    ("name", "value"), [("spares", 1.5), ("spares", -1), ("rate", -1), ("rate", "x"), ("restart", 0),
                        ("interval", "often"), ("failures", "no-such"), ("failures", "/etc/x.toml"),
                        ("rate", float("nan")), ("interval", "0")]
)  # fmt: skip
def test_what_cannot_be_asked_of_a_run_is_a_sentence(name: str, value: object) -> None:
    from presage.ui.replies import question_reply

    reply = question_reply({**FIRST_QUESTION, name: value})
    assert reply["knobs"] == [name] and "\n" not in reply["wrong"]
