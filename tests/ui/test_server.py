"""The page's server: whom it answers, what it makes of bad requests, and that users do not meet each other's plans."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("dash", reason="pip install 'presage[ui]'")
pytest.importorskip("waitress", reason="pip install 'presage[ui]'")

from flask.testing import FlaskClient

from presage.ui.knobs import KNOBS
from presage.ui.plans import first_plan, text_of
from presage.ui.question import FIRST_QUESTION, SharedPlans, make_link
from presage.ui.replies import run_reply, spread_reply, step_reply
from presage.ui.server import make_app, refused

NAMES = [k.name for k in KNOBS]
ASKED = {"tokens": "15T", "days": 60, "noise": "production"}
POST = "/_dash-update-component"


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app(lambda: first_plan(None))


@pytest.fixture
def client(app: Any) -> FlaskClient:
    found: FlaskClient = app.server.test_client()
    found.environ_base["HTTP_HOST"] = "127.0.0.1:8765"
    return found


@pytest.fixture(scope="module")
def body(app: Any) -> dict[str, Any]:
    """The request that the page sends when a knob of plan A is turned, as its own list of callbacks has it."""
    client = app.server.test_client()
    listed = client.get("/_dash-dependencies", headers={"Host": "localhost"}).json
    asked = next(c for c in listed if "wrong-asked.children" in c["output"])
    values = {f"{name}.value": value for name, value in FIRST_QUESTION.items()} | {"two.data": False}
    plan = first_plan(None)

    def entry(i: dict[str, str]) -> Any:
        if i["id"].startswith("{"):
            ident = json.loads(i["id"])
            if "knob" in ident:
                return [
                    {"id": {"plan": ident["plan"], "knob": n}, "property": "value", "value": plan.knobs[n]}
                    for n in NAMES
                ]
            return {"id": ident, "property": i["property"], "value": dict(plan.rest)}
        return {**i, "value": values[f"{i['id']}.{i['property']}"]}

    outputs = [_output(o) for o in asked["output"].strip(".").split("...")]
    return {
        "output": asked["output"],
        "outputs": outputs,
        "inputs": [entry(i) for i in asked["inputs"]],
        "state": [{"id": json.loads(i["id"]), "property": "data", "value": None} for i in asked["state"]],
        "changedPropIds": [],
    }


def _output(text: str) -> Any:
    ident, prop = text.rsplit(".", 1)
    if not ident.startswith("{"):
        return {"id": ident, "property": prop}
    found = json.loads(ident)
    for kind in ("field", "knob"):
        if found.get(kind) == ["ALL"]:
            return [{"id": {"plan": found["plan"], kind: n}, "property": prop} for n in NAMES]
    return {"id": found, "property": prop}


def changed(body: dict[str, Any], **knobs: Any) -> dict[str, Any]:
    """The same request with knobs of plan A turned."""
    out: dict[str, Any] = json.loads(json.dumps(body))
    for entry in out["inputs"][0]:
        entry["value"] = knobs.get(entry["id"]["knob"], entry["value"])
    return out


def step_of(reply: Any) -> dict[str, Any]:
    found: dict[str, Any] = reply.json["response"]['{"plan":"a","store":"step"}']["data"]
    return found


def test_only_loopback_is_answered(client: FlaskClient) -> None:
    for host in ("localhost", "localhost:8765", "127.0.0.1:1", "[::1]:8765"):
        assert client.get("/", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:8765", "[::2]", "]", "localhost@evil.example"):
        assert client.get("/", headers={"Host": host}).status_code == 403
        assert client.get("/assets/ui.js", headers={"Host": host}).status_code == 403
    assert refused("", None)
    assert client.post(POST, json={}, headers={"Origin": "https://evil.example"}).status_code == 403
    assert not refused("localhost:8765", "http://localhost:8765")


def test_the_page_fetches_nothing_from_elsewhere(client: FlaskClient) -> None:
    page = client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe-eval" not in policy
    text = page.get_data(as_text=True)
    import re

    for address in re.findall(r"""(?:src|href)=["']([^"']+)""", text):
        assert address.startswith("/"), address
        assert client.get(address).status_code == 200


def test_a_turned_knob_is_answered(client: FlaskClient, body: dict[str, Any]) -> None:
    reply = client.post(POST, json=changed(body, gpus=8192))
    assert reply.status_code == 200
    plan = first_plan(None)
    alone = step_reply({**plan.knobs, "gpus": 8192}, plan.rest, ASKED)
    assert step_of(reply)["measures"] == json.loads(json.dumps(alone["measures"]))
    assert reply.json["response"]["link"]["data"].startswith("#a=")


BAD: list[Any] = [
    b"", b"{", b"null", b"[]", b"5", b'"x"', b"{}", b'{"output": 5}', b'{"output": "no.such"}', b"\xff\xfe",
    b'{"output": "..x.y...z.w..", "inputs": 3}', b"[" * 100_000,
    b'{"output": "link.data", "inputs": [], "outputs": []}',
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_bad_requests_are_turned_down(client: FlaskClient, data: bytes) -> None:
    reply = client.post(POST, data=data, content_type="application/json")
    assert 400 <= reply.status_code < 500
    assert "Traceback" not in reply.get_data(as_text=True)
    assert client.get("/").status_code == 200


def test_too_large_and_wrong_kinds_of_requests(client: FlaskClient) -> None:
    assert client.post(POST, data=b"x" * 600_000, content_type="application/json").status_code == 413
    assert client.post(POST, data=b"x=1").status_code == 415
    assert client.get(POST).status_code in (200, 404, 405)  # Dash shows the page on paths it does not know
    assert client.put("/").status_code == 405
    assert client.get("/assets/../server.py").status_code in (200, 404)
    assert b"waitress" not in client.get("/assets/..%2fserver.py").data


@pytest.mark.parametrize("odd", [None, True, [], {}, {"$": 1}, "x" * 5000, -1, 1e308, 2.5, "NaN", "\0"], ids=repr)
def test_odd_values_are_sentences(client: FlaskClient, body: dict[str, Any], odd: Any) -> None:
    for name in ("gpus", "model", "price", "sharding"):
        reply = client.post(POST, json=changed(body, **{name: odd}))
        assert reply.status_code == 200
        if not (name == "price" and odd is None) and not (name == "price" and odd == 2.5):
            assert step_of(reply)["wrong"]
    out = json.loads(json.dumps(body))
    for entry in out["inputs"][1:]:
        if isinstance(entry, dict):
            entry["value"] = odd
    assert client.post(POST, json=out).status_code in (200, 400)
    broken = json.loads(json.dumps(body))
    broken["inputs"][0] = broken["inputs"][0][:3]
    assert client.post(POST, json=broken).status_code == 400


@pytest.mark.slow
def test_twenty_users_get_their_own_answers(app: Any, body: dict[str, Any]) -> None:
    turns = [{"gpus": 1024 << u % 4, "cp": 1 + u % 2, "price": 1.0 + u} for u in range(20)]

    def ask(turn: dict[str, Any]) -> list[Any]:
        client = app.server.test_client()
        client.environ_base["HTTP_HOST"] = "127.0.0.1"
        moved = (client.post(POST, json=changed(body, **{**turn, "tp": tp})) for tp in (8, 4, 8))
        return [step_of(r) | {"status": r.status_code} for r in moved]

    one_by_one = [ask(turn) for turn in turns]
    with ThreadPoolExecutor(20) as users:
        together = list(users.map(ask, turns))
    assert together == one_by_one
    assert all(r["status"] == 200 and "measures" in r for replies in together for r in replies)
    assert len({r[0]["text"] for r in together}) == 20


def small(gpus: int) -> str:
    plan = first_plan(None)
    knobs = {"model": "llama3-8b", "tp": 8, "pp": 1, "cp": 1, "gpus": gpus, "global_batch": 64}
    return text_of(type(plan)({**plan.knobs, **knobs}, {}))


def test_draws_at_once_are_those_drawn_alone() -> None:
    texts = [small(gpus) for gpus in (8, 16)]
    with ThreadPoolExecutor(4) as users:
        jobs = [users.submit(reply, text, ASKED) for text in texts for reply in (spread_reply, run_reply)]
        together = [job.result()["measures"] for job in jobs]
    from presage.ui.answers import draw_run, drawn_job

    drawn_job.cache_clear()
    draw_run.cache_clear()
    assert together == [reply(text, ASKED)["measures"] for text in texts for reply in (spread_reply, run_reply)]


def test_drawn_numbers_are_those_of_the_commands(tmp_path: Any) -> None:
    from commands import runner
    from presage.cli import run

    text = small(64)
    (tmp_path / "plan.toml").write_text(text)
    shown = {m[0]: m[3] for m in run_reply(text, {**ASKED, "tokens": "1T"})["measures"]}
    options = ("--tokens", "1T", "--deadline", "60d", "--draws", "500", "--json", "-")
    told = json.loads(runner(run.command)(tmp_path / "plan.toml", *options))
    assert shown["Whole run"] == pytest.approx(told["days"]["p50"], rel=1e-12)
    assert shown["By the deadline"] == pytest.approx(told["deadline"]["probability"], rel=1e-12)
    assert shown["Cost"] == pytest.approx(told["cost"]["p50"], rel=1e-12)


def test_the_drawn_step_is_that_of_presage_job(tmp_path: Any) -> None:
    from commands import runner
    from presage.cli import job

    text = small(8)
    (tmp_path / "plan.toml").write_text(text)
    shown = {m[0]: m[3] for m in spread_reply(text, ASKED)["measures"]}
    told = json.loads(runner(job.command)(tmp_path / "plan.toml", "--draws", "4000", "--json", "-"))
    assert shown["Step"] * 1e3 == pytest.approx(
        told["step_ms"]["p50"], rel=1e-3
    )  # --draws draws evenly, the page does not
    assert shown["p95 step"] * 1e3 == pytest.approx(told["distribution"]["step_ms"]["p95"]["value"], rel=2e-3)


def test_runs_that_nobody_waits_for_and_noise_from_files() -> None:
    assert "years" in run_reply(small(8), {**ASKED, "tokens": "300T"})["wrong"]
    assert "choose one of" in spread_reply(small(8), {**ASKED, "noise": "/etc/passwd"})["wrong"]


def test_the_page_says_what_the_command_says(tmp_path: Any) -> None:
    from commands import runner
    from presage.cli import job

    text = small(8)
    (tmp_path / "plan.toml").write_text(text)
    reply, printed = spread_reply(text, ASKED), " ".join(runner(job.command)(tmp_path / "plan.toml").split())
    assert reply["sentence"] in printed and reply["verdict"] in printed


def test_slow_draws_leave_threads_for_certain_answers() -> None:
    import threading

    from presage.ui import replies as drawing

    go, started = threading.Event(), threading.Semaphore(0)

    def slow() -> bool:
        started.release()
        return go.wait(30)

    with ThreadPoolExecutor(80) as users:
        asked = [users.submit(drawing.draw, slow) for _ in range(80)]
        for _ in range(drawing.AT_ONCE):
            assert started.acquire(timeout=10)
        plan = first_plan(None)
        assert "measures" in step_reply(plan.knobs, plan.rest, ASKED)
        assert "busy" in spread_reply(small(8), ASKED)
        go.set()
        ended = [f.exception() for f in asked]
    most = drawing.AT_ONCE + drawing.WAITING
    assert sum(e is None for e in ended) == most and sum(isinstance(e, drawing.BusyError) for e in ended) == 80 - most


def test_hosts_and_origins_are_compared_exactly(client: FlaskClient) -> None:
    for host in ("evil.com@localhost", "localhost:notaport", "localhost:", "LOCALHOST.evil", "127.0.0.1:8765:1"):
        assert refused(host, None)
    for origin in (
        "null",
        "http://localhost:1",
        "https://localhost:8765",
        "http://localhost:8765.evil",
        "http://127.0.0.1:8765",
    ):
        assert refused("localhost:8765", origin)
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert client.get("/assets/ui.js", headers=elsewhere).status_code == 403
    assert client.get("/", headers=elsewhere).status_code == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get("/", headers=link).status_code == 200
    assert client.post(POST, json={}, headers=link).status_code == 403


def test_control_characters_of_a_path_never_reach_the_terminal(client: FlaskClient, capsys: Any) -> None:
    reply = client.get("/_dash-component-suites/x%1b%5d0;pwned%07%1b%5b31mINJECTED/y.js")
    said = capsys.readouterr()
    assert reply.status_code == 404
    assert "\x1b" not in said.err + said.out and "\x07" not in said.err + said.out


def test_links_open() -> None:
    from presage.ui.opening import link_reply

    text = text_of(first_plan(None))
    found = link_reply(make_link(SharedPlans({"a": text, "b": text}, {"tokens": "1T", "days": "30"})), None)
    assert found[0] == found[1] == [first_plan(None).knobs[n] for n in NAMES]
    assert found[4] == "1T" and found[5] == 30.0 and found[-3] is True
    assert "cut off" in link_reply("#a=xx", None)[-2]
    assert "reads no files" in link_reply(make_link(SharedPlans({"a": "arguments = '/etc/passwd'"})), None)[-2]


def test_what_is_missing_is_overrides_from_options(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from presage.errors import PresageError
    from presage.ui.server import check_installed

    check_installed()
    monkeypatch.setitem(sys.modules, "waitress", None)
    with pytest.raises(PresageError, match=r"pip install 'presage\[ui\]'"):
        check_installed()


def test_a_port_that_is_taken_is_overrides_from_options(app: Any) -> None:
    import socket

    from presage.errors import PresageError
    from presage.ui.server import HOST, serve

    with socket.create_server((HOST, 0)) as taken, pytest.raises(PresageError, match="--port 0"):
        serve(app, taken.getsockname()[1], print)
