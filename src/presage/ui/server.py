"""The page's server: on this machine alone, for browsers on it alone, whatever they send."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.errors import PresageError
from presage.report.html.theme import DARK, LIGHT

if TYPE_CHECKING:
    from dash import Dash
    from flask import Flask

    from presage.ui.plans import Plan


HOST = "127.0.0.1"
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")
MOST_BODY = 512 * 1024  # bytes of a request
MOST_OPENED = (64 << 20) + MOST_BODY  # of one with files
OPEN, MOST_AT_ONCE = "/open", 64  # where files are sent, and how many
QUIET = 0.3  # seconds for the first page, before what answers need is loaded
THREADS = 64  # some of them wait for draws
INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<meta name="color-scheme" content="light dark">
<title>{%title%}</title>{%favicon%}<link rel="stylesheet" href="/page.css">{%css%}</head>
<body>{%app_entry%}{%config%}<script src="/themes.js"></script>{%scripts%}{%renderer%}</body>
</html>"""


def check_installed() -> None:
    """Raises where what makes the page is not installed."""
    try:
        import dash
        import waitress
    except ImportError as e:
        raise PresageError(f"the page needs {e.name}: pip install 'presage[ui]'") from None
    del dash, waitress


def make_app(first: Callable[[], Plan]) -> Dash:
    """The page as a WSGI app that keeps nothing of its users; `first` is what it begins with, made when first shown."""
    from dash import Dash, html
    from flask import request

    from presage.ui.callbacks import register
    from presage.ui.layout import page

    def layout() -> Any:
        """Dash asks for it once more before it answers anything: that need not wait for what a plan needs."""
        return page(first()) if request.path == "/_dash-layout" else html.Div()

    app = Dash(
        "presage.ui", assets_folder=str(Path(str(files("presage.ui"))) / "assets"), serve_locally=True, compress=False,
        title="presage: plan a training job", update_title="", index_string=INDEX, add_log_handler=False,
        use_pages=False, include_pages_meta=False, enable_mcp=False, use_async=False, suppress_callback_exceptions=True,
    )  # fmt: skip
    app.layout = layout
    register(app)
    _guard(app.server, app.csp_hashes())
    app.server.test_client().get(
        "/", base_url=f"http://{HOST}"
    )  # Dash sets itself up at the first request, for one user
    return app


# ---- what comes in, what goes out


def _guard(server: Flask, hashes: Sequence[str]) -> None:
    from flask import Response, request
    from werkzeug.exceptions import HTTPException

    server.config["MAX_CONTENT_LENGTH"] = MOST_BODY
    style = files("presage.report.html").joinpath("page.css").read_text("utf-8")
    sent = headers(hashes)

    @server.before_request
    def only_here() -> Any:
        request.max_content_length = MOST_OPENED if request.path == OPEN else MOST_BODY
        why = refused(request.headers.get("Host", ""), request.headers.get("Origin"))
        why = why or from_elsewhere(dict(request.headers), request.method, request.path)
        return Response(why, 403, mimetype="text/plain") if why else None

    @server.after_request
    def safely(response: Any) -> Any:
        response.headers.update(sent)
        return response

    themes = "window.presageTemplates = " + json.dumps({"light": LIGHT, "dark": DARK}) + ";\n"

    @server.get("/themes.js")
    def shared_themes() -> Any:
        return Response(themes, mimetype="text/javascript")

    @server.get("/page.css")
    def shared_style() -> Any:
        return Response(style, mimetype="text/css")

    @server.post(OPEN)
    def opened() -> Any:
        """Files that were dropped on the page, beside the text of the plan that they are put into."""
        from plotly.utils import PlotlyJSONEncoder

        from presage.ui.replies import open_files_reply

        files = [(f.filename or "file", f.read()) for f in request.files.getlist("files")[:MOST_AT_ONCE]]
        reply = open_files_reply(files, request.form.get("text", ""))
        return Response(json.dumps(reply, cls=PlotlyJSONEncoder), mimetype="application/json")

    @server.errorhandler(HTTPException)
    def turned_down(e: Any) -> Any:
        return Response(f"presage: {e.name}\n", e.code, mimetype="text/plain")

    @server.errorhandler(Exception)
    def no_request(e: Exception) -> Any:
        """Replies never raise: what does is a request that this page does not send, or a fault to be seen."""
        print(f"presage ui: {request.path!a}: {type(e).__name__}: {str(e)!a}", file=sys.stderr)
        if request.method != "POST":
            return Response("presage: there is no such page\n", 404, mimetype="text/plain")
        return Response("presage: that is no request of this page\n", 400, mimetype="text/plain")


def refused(host: str, origin: str | None) -> str:
    """Why a request is not answered: other names for this machine are other sites' tricks (DNS rebinding), and other
    ports of it are other programs."""
    if not HOSTS.fullmatch(host):
        return "presage answers only to localhost\n"
    if origin is not None and origin != f"http://{host}":
        return "presage answers only to its own page\n"
    return ""


def from_elsewhere(sent: Mapping[str, str], method: str, path: str) -> str:
    """Why a request that a browser sends for another site is not answered; a link that a person follows is."""
    if sent.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return ""
    followed = sent.get("Sec-Fetch-Mode") == "navigate" and sent.get("Sec-Fetch-Dest") == "document"
    return "" if followed and method == "GET" and path == "/" else "presage answers only to its own page\n"


def headers(hashes: Sequence[str]) -> dict[str, str]:
    """Nothing is fetched from elsewhere, nothing else may show or script the page."""
    policy = {
        "default-src": "'none'", "script-src": " ".join(["'self'", *hashes]), "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data: blob:", "font-src": "'self' data:", "connect-src": "'self'", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    return {
        "Content-Security-Policy": "; ".join(f"{k} {v}" for k, v in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }


# ---- serving


def serve(app: Dash, port: int, ready: Any) -> None:
    """Until somebody stops it; `ready(address)` is called when it listens."""
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # how many wait is not for the user's terminal
    try:
        server = create_server(
            app.server, host=HOST, port=port, threads=THREADS, ident=None, max_request_body_size=MOST_OPENED,
            channel_timeout=60, clear_untrusted_proxy_headers=True,
        )  # fmt: skip
    except OSError as e:
        why = e.strerror or e
        raise PresageError(f"port {port} is not available ({why}): presage ui --port 0 takes a free one") from e
    warm = threading.Timer(QUIET, _warm)
    warm.daemon = True
    warm.start()
    ready(f"http://{HOST}:{server.effective_port}")
    server.run()


def _warm() -> None:
    """Loads what first answers need, while the browser loads the page. What fails, when the page is closed meanwhile
    above all, the first answer would tell."""
    from presage.ui.plans import first_plan
    from presage.ui.question import FIRST_QUESTION
    from presage.ui.replies import run_reply, spread_reply, step_reply

    with suppress(Exception):
        plan = first_plan(None)
        found = step_reply(plan.knobs, plan.rest, FIRST_QUESTION)
        spread_reply(found["text"], FIRST_QUESTION)
        run_reply(found["text"], FIRST_QUESTION)
