"""Which published runs stand behind predictions of jobs, in groups: what they were, and how wrong presage is on them.

python -m presage_validation.evidence ../shared/runs/public_runs.csv ../shared/runs/aws_moe/aws_moe_runs.csv

A group is a source's runs on one GPU, dense or with experts that one dispatcher reaches. Errors are those with
efficiencies fitted without the source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from presage.configs.job import Job
from presage.errors import PresageError
from presage.files import write_whole
from presage.prediction.jobs.efficiency import efficiency_without
from presage.prediction.jobs.job_step import job_step
from presage.search.evidence import FILE
from presage_validation.public_table import read_table, run_seconds
from presage_validation.run_jobs import COLUMNS, job_of_run, simulated

Run = tuple[Job, float]  # a job, and by how much its step is off
HEAD = """\
# Published runs in groups, and presage's error on them. Written by
# `python -m presage_validation.evidence RUNS.csv...`.
"""


def runs(path: Path) -> Iterator[tuple[str, Run]]:
    """The source of each measured run that can be predicted, its job and its error."""
    for _, row in read_table(path, COLUMNS):
        if row["complete"] == "dlrm" or simulated(row):
            continue
        try:
            job, source = job_of_run(row), row["source_key"]
            yield source, (job, job_step(job, efficiency_without(source)).seconds / run_seconds(row) - 1)
        except PresageError:
            continue


def group_lines(source: str, gpu: str, dispatcher: str, found: list[Run]) -> Iterator[str]:
    """A group as a table of the file."""
    jobs = [job for job, _ in found]
    yield from ("[[groups]]", f'source = "{source}"', f'gpu = "{gpu}"', f'dispatcher = "{dispatcher}"')
    yield f"runs = {len(found)}"
    for name, values in (
        ("gpus", [j.gpus for j in jobs]), ("tp", [j.parallel.tp for j in jobs]), ("pp", [j.parallel.pp for j in jobs]),
        ("ep", [j.parallel.ep for j in jobs]), ("micro_batch", [j.micro_batch for j in jobs]),
    ):  # fmt: skip
        yield f"{name} = [{min(values)}, {max(values)}]"
    yield from (f"error = {sum(abs(e) for _, e in found) / len(found):.3f}", "")


def evidence_text(every: Iterable[tuple[str, Run]]) -> str:
    """The file of all groups."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for source, (job, error) in every:
        sent = job.dispatcher if job.model.experts else ""
        groups.setdefault((source, job.platform.gpu.key, sent), []).append((job, error))
    return "\n".join([HEAD, *(line for key in sorted(groups) for line in group_lines(*key, groups[key]))])


if __name__ == "__main__":
    write_whole(FILE, evidence_text(one for path in sys.argv[1:] for one in runs(Path(path))).encode())
