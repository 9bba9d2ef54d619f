import gc
import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

try:
    from hypothesis import settings
except ImportError:  # a bare installation runs tests without it
    pass
else:
    # The same examples every time, so that a change is to blame for what fails; HYPOTHESIS_PROFILE=random, which
    # `make fuzz` sets, draws others and more, and a failure there prints what repeats it.
    # No deadline: a busy machine would break it.
    settings.register_profile("same", derandomize=True, print_blob=True, deadline=None, max_examples=40)
    settings.register_profile("random", print_blob=True, deadline=None, max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Files that take longest come first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "test_docs.py", "test_ui_browser.py", "test_layouts.py", "test_tensor_parallel.py", "test_scale.py",
    "test_ranks.py", "test_wheel.py", "test_determinism.py", "test_terminal.py", "test_capture_models.py",
    "test_parallel.py", "test_pages_step.py", "test_whatif.py", "test_runs_simulate.py", "test_variants_optimizer.py",
    "test_notebooks.py", "test_edits_tables.py", "test_place.py", "test_cli_mistakes.py", "test_preset_jobs.py",
    "test_real_ranks.py", "test_predict_job.py", "test_gloo.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="module", autouse=True)
def _settled() -> Iterator[None]:
    """What a module leaves in caches stays: collections that look through it made later tests three times slower."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def few_draws_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("few_draws")


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch, few_draws_cache: Path) -> None:
    """Steps of jobs are drawn from few replicas: for tests of what is told, not of how precise the figures are."""
    draw = import_module("presage.prediction.draws.draw")  # the package has a function of that name
    monkeypatch.setattr(draw, "GPUS", 200)
    monkeypatch.setattr(draw, "TASKS", 50_000)
    monkeypatch.setattr("presage.prediction.draws.noise_sets.EACH", 4)
    monkeypatch.setenv("PRESAGE_CACHE", str(few_draws_cache))  # not where figures of whole draws are kept


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured data, or a skip that says how to get the test to run."""
    path = Path(os.environ.get("PRESAGE_DATA", ROOT.parent / "shared"))
    if not (path / "traces").is_dir():
        pytest.skip(f"no measured data at {path}: set PRESAGE_DATA to the folder that holds traces/ and h200/")
    return path


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a worker."""
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to look at pages with: install one of {', '.join(BROWSERS)}")
    with driver.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=found, args=list(OPTIONS))
        yield browser
        browser.close()
