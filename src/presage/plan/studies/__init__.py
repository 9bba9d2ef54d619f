"""Studies of machines that are not built yet: more GPUs, faster ones, larger NVLink domains, less power."""

from presage.plan.studies.compute import compute_study
from presage.plan.studies.domain import domain_study
from presage.plan.studies.point import Point, Setup, Skipped, Study
from presage.plan.studies.power import power_study
from presage.plan.studies.scale import scale_study

__all__ = [
    "Point",
    "Setup",
    "Skipped",
    "Study",
    "compute_study",
    "domain_study",
    "power_study",
    "scale_study",
]
