"""Pages in a browser, and a few answers to make pages of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from presage.graph import save
from presage.graph.graph import Graph
from presage.prediction.api import predict
from presage.prediction.step import StepResult
from presage.report.answer import Answer
from presage.report.html import write_page

HERE = Path(__file__).resolve().parent


@dataclass
class Look:
    """A page in the browser, with what went wrong and what it asked the network for."""

    tab: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __call__(self, script: str) -> Any:
        return self.tab.evaluate(script)

    def count(self, selector: str) -> int:
        return int(self.tab.locator(selector).count())

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).first.inner_text())

    def until(self, script: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true; the page's policy forbids Playwright's own wait_for_function."""
        end = monotonic() + seconds
        while not self(script):
            assert monotonic() < end, f"never true: {script}"
            self.tab.wait_for_timeout(50)

    def well(self) -> None:
        """Nothing failed, nothing was fetched, all charts are drawn."""
        assert self.errors == []
        assert self.requests == []
        assert int(self("document.documentElement.dataset.drawn")) == self.count(".chart")
        assert self("[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg.main-svg'))")


@pytest.fixture
def look(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Look]]:
    """`look(page, dark=False, width=1280)`: write the page, open it, wait until it is drawn."""
    opened = []

    def open_page(page: Answer, dark: bool = False, width: int = 1280, command: str = "presage x") -> Look:
        path = tmp_path / "page.html"
        write_page(page, path, command)
        scheme = "dark" if dark else "light"
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)
        opened.append(context)
        seen = Look(context.new_page())
        seen.tab.on("pageerror", lambda e: seen.errors.append(str(e)))
        seen.tab.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        seen.tab.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else seen.requests.append(r.url)
        )
        seen.tab.goto(path.as_uri())
        seen.tab.wait_for_selector("html[data-drawn]", timeout=20_000, state="attached")
        return seen

    yield open_page
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def gpt() -> Graph:
    """examples/gpt.py:build as captured with batch=2, sequence=256, layers=2, width=256, heads=4 and vocab=4096."""
    return save.read(HERE / "gpt.presage")


@pytest.fixture(scope="session")
def predicted(gpt: Graph) -> StepResult:
    return predict(gpt, draws=40)
