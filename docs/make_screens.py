"""Take the screenshots of the docs anew: reports and the planners' page, in the machine's own Chromium.

python docs/make_screens.py [--gallery: those of the gallery only]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PRESAGE = str(Path(sys.executable).with_name("presage"))
JOB = "examples/jobs/llama3.1-405b.toml"
# Picture, what is asked, dark, and height in pixels.
REPORTS = (
    ("report.png", ["job", JOB, "--tokens", "15T", "--price", "2.5", "--draws", "10000"], False, 1500),
    ("report_step_dark.png", ["predict", "examples/gpt.py:build", "--arg", "batch=8"], True, 1900),
    ("report_run.png", ["run", JOB, "--tokens", "15T", "--deadline", "60d"], False, 1300),
    ("report_plan.png", ["plan", JOB, "--gpus", "16384"], False, 1300),
)
FULL = [JOB, "--tokens", "15T"]
# The gallery: the reports that `make demo` writes, and some more.
GALLERY = {
    "step": ["predict", "examples/gpt.py:build", "--arg", "batch=8"],
    "whatif": ["whatif", "examples/gpt.py:build", "--arg", "batch=1", "--apply", "bf16,cuda_graph"],
    "job": ["job", *FULL, "--draws", "10000"],
    "run": ["run", *FULL, "--deadline", "60d"],
    "plan": ["plan", JOB, "--gpus", "16384"],
    "trace": ["trace", "demo"],
    "replay": ["replay", "demo", "--scale", "host=EmbeddingBag:0.25"],
    "sensitivity": ["sensitivity", JOB, "--draws", "1000"],
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]


def main() -> None:
    with sync_playwright() as p, tempfile.TemporaryDirectory() as folder:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        pictures = [(f"gallery/{name}.png", asked, False, 900, 820) for name, asked in GALLERY.items()]
        if "--gallery" not in sys.argv:
            pictures += [(name, asked, dark, 1200, height) for name, asked, dark, height in REPORTS]
        for name, asked, dark, width, height in pictures:
            page = Path(folder) / "report.html"
            subprocess.run([PRESAGE, "--quiet", *asked, "--report", str(page)], cwd=ROOT, check=True)
            _picture(browser, page, DOCS / name, dark, width, height)
        if "--gallery" not in sys.argv:
            _ui(browser)
        browser.close()


def _picture(browser: Any, page: Path, out: Path, dark: bool, width: int, height: int) -> None:
    out.parent.mkdir(exist_ok=True)
    opened = _opened(browser, dark, width, height)
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-drawn]", state="attached")
    opened.wait_for_timeout(500)
    opened.screenshot(path=str(out))
    opened.close()


def _opened(browser: Any, dark: bool, width: int, height: int) -> Any:
    scheme = "dark" if dark else "light"
    return browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})


def _ui(browser: Any) -> None:
    """Two plans by day, the second the best that is found; one by night, and on fewer and more GPUs."""
    server = subprocess.Popen(
        [PRESAGE, "ui", "--port", "0", "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        for name, dark, compared in (("ui.png", False, True), ("ui_dark.png", True, False)):
            opened = _opened(browser, dark, 1440, 1100)
            opened.goto(address)
            opened.wait_for_selector("text=By the deadline", timeout=60_000)
            if compared:
                opened.get_by_text("Best plan for these GPUs").first.click()
                opened.wait_for_selector("text=Plan B is the best", timeout=90_000)
            for plan in "ab" if compared else "a":
                opened.wait_for_selector(f".answer.{plan} .fact:not(.waits)[data-fact='Whole run']", timeout=120_000)
            opened.wait_for_timeout(3000)
            opened.screenshot(path=str(DOCS / name))
            if not compared:
                opened.locator("#sweep").click()
                opened.wait_for_selector("#sweep-plans .scatterlayer .trace >> nth=7", timeout=120_000)
                opened.wait_for_timeout(1000)
                opened.locator("#sweep-plans").screenshot(path=str(DOCS / "ui_sweep.png"))
            opened.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
