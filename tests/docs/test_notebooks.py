"""The notebooks of the docs run, and show what is stored in them."""

from __future__ import annotations

from pathlib import Path

import pytest

for package in ("nbclient", "nbformat", "ipykernel", "pandas", "torch", "plotly"):
    pytest.importorskip(package)

import nbformat  # noqa: E402
from make_notebooks import NOTEBOOKS, executed, texts  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_there_is_one_for_a_step_a_job_and_a_trace() -> None:
    assert {p.stem for p in NOTEBOOKS} == {"step", "job", "trace"}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name, marks=() if p.stem == "trace" else pytest.mark.slow) for p in NOTEBOOKS]
)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    stored = texts(nbformat.read(path, as_version=4))
    assert stored and texts(executed(path, tmp_path / "root")) == stored, (
        f"out of date: run `python docs/make_notebooks.py {path.name}`"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_is_small_and_needs_no_script(path: Path) -> None:
    assert path.stat().st_size < 60_000 and "<script" not in path.read_text()
