"""What the page begins with: the job of a file that its owner names at the start, or an example."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from presage.configs.job_file import JobTable
from presage.errors import InputError
from presage.files.reading import read_text
from presage.search.job_toml import job_toml
from presage.ui.files import no_files
from presage.ui.knobs import Wrong
from presage.ui.plans import Plan, plan_of_text

__all__ = ["first_plan"]


@cache
def first_plan(path: Path | None) -> Plan:
    """Files that a job names are read here, once, because who starts the page says so; the page itself reads none."""
    if path is None:
        return plan_of_text(files("presage.ui").joinpath("first.toml").read_text("utf-8"))
    try:
        return plan_of_text(_text(path))
    except Wrong as e:
        raise InputError(path, str(e)) from e


def _text(path: Path) -> str:
    file = JobTable.read(path)
    if file.has_embeddings:
        raise InputError(path, f"is a recommendation job, which the page does not plan: use presage dlrm {path}")
    try:
        no_files(file.table)
        return read_text(path)
    except Wrong:
        parsed = file.parse(checked=False)
        return job_toml(parsed.job, file.table.get("cluster", {}))
