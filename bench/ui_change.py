"""How long a change of a setting takes on the planning page: from the key press to the painted answer, in Chromium.

python bench/ui_change.py [--changes 20]

Prints the median and the slowest of the changes, and the machine's load, without which the figure says little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
COMMAND = [str(Path(sys.executable).with_name("presage")), "ui", "--port", "0", "--no-open"]
# The clock starts at the key press and stops when the frame after the new answer has been painted.
WATCH = """() => { window.times = []; let from = 0, last = "";
    const subject = () => (document.querySelector("#answer-a .subject") || {}).textContent;
    document.addEventListener("keydown", () => { from = performance.now(); last = subject(); }, true);
    new MutationObserver(() => { if (!from || subject() === last) return; const start = from; from = 0;
        requestAnimationFrame(() => setTimeout(() => window.times.push(performance.now() - start)));
    }).observe(document.querySelector("#answer-a"), {childList: true, subtree: true, characterData: true}); }"""


def measure_changes(page: Any, changes: int) -> list[float]:
    """Seconds from each key press on the slider of GPUs to the painted answer; every other one back and forth."""
    page.wait_for_selector(".answer.a .fact:not(.waits)[data-fact='Whole run']")
    page.wait_for_timeout(1500)
    page.evaluate(WATCH)
    handle = page.locator("#controls-a [role=slider]")
    handle.focus()
    for i in range(changes):
        handle.press("ArrowLeft" if i % 2 else "ArrowRight")
        page.wait_for_timeout(5000)  # the answer, and the draws that follow it
        while page.evaluate("window.times.length") <= i:
            page.wait_for_timeout(500)
    return [ms / 1e3 for ms in page.evaluate("window.times")]


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--changes", type=int, default=20)
    changes = parser.parse_args().changes
    server = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        with sync_playwright() as p:
            found = next(path for name in BROWSERS if (path := shutil.which(name)))
            browser = p.chromium.launch(executable_path=found, args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.set_default_timeout(120_000)
            page.goto(address)
            times = measure_changes(page, changes)
            browser.close()
        said = f"median {statistics.median(times):.2f} s, slowest {max(times):.2f} s of {len(times)} changes"
        print(f"{said}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
