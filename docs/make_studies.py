"""Make the plots of docs/sensitivity.md and docs/studies.md, and the tables of the latter that need a search."""

from __future__ import annotations

import sys
from pathlib import Path

from presage.configs.job_file import read_transformer_job
from presage.prediction.draws import step_model, without_fitted_stragglers
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.sensitivity import sensitivity
from presage.report.sensitivity_answer import plot_sensitivity
from presage.report.study_answer import plot_study
from presage.studies import (
    Study,
    StudyPoint,
    StudySetup,
    compute_study,
    domain_study,
    hot_rack_study,
    noise_study,
    power_study,
    scale_study,
    slow_node_study,
)

DOCS = Path(__file__).resolve().parent
JOBS = DOCS.parent / "examples" / "jobs"
PAGE = DOCS / "studies.md"
DENSE, EXPERTS = "llama3.1-405b", "deepseek-v3"
BEGIN, END = "<!-- searched -->\n", "<!-- end -->\n"


def tornado(name: str, path: Path) -> None:
    shape = step_model(read_transformer_job(JOBS / f"{name}.toml"))
    noise = belief_of(shape.job, shape.seconds)[0].noise
    plot_sensitivity(sensitivity(without_fitted_stragglers(shape, noise), noise), path, 12)


def studies() -> None:
    dense, experts = (read_transformer_job(JOBS / f"{name}.toml") for name in (DENSE, EXPERTS))
    for found in (scale_study(dense), compute_study(experts), power_study(dense)):
        plot_study(found, DOCS / f"study_{found.kind}.svg")
    noise()


def noise() -> None:
    """The plots of docs/tail.md."""
    dense, own = (read_transformer_job(JOBS / f"{name}.toml") for name in (DENSE, "own_model"))
    setup = StudySetup(draws=4_000)
    for found in (
        noise_study(own, setup=setup),
        slow_node_study(dense, setup=setup),
        hot_rack_study(dense, rack=64, uplink=2.0, setup=setup),
    ):
        plot_study(found, DOCS / f"study_{found.kind}.svg")


def searched(workers: int) -> str:
    """Domains with the best plan of each, as a table."""
    out = ["| job | NVLink | step, no noise | p50 | p95 | times as fast | transfers that show | plan |"]
    out += ["|---|---|---:|---:|---:|---:|---:|---|"]
    for name in (DENSE, EXPERTS):
        found = domain_study(
            read_transformer_job(JOBS / f"{name}.toml"), setup=StudySetup(), best=True, workers=workers
        )
        if name == EXPERTS:
            plot_study(found, DOCS / "study_domain.svg")
        out += [row(found, p) for p in found.points]
    return "\n".join(out) + "\n"


def row(s: Study, p: StudyPoint) -> str:
    shown = f"{p.prediction.exposed / p.prediction.seconds:.1%}"
    steps = " | ".join(f"{x:.4g} s" for x in (p.quiet, p.p50.value, p.p95.value))
    return f"| {s.job.name} | {p.name} | {steps} | {p.more['speedup']:.2f} | {shown} | `{p.note}` |"


def main() -> None:
    for name in (DENSE, EXPERTS):
        tornado(name, DOCS / f"sensitivity_{name}.svg")
    studies()
    table = searched(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
