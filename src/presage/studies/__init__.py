"""Studies of machines that are not built yet: more GPUs, faster ones, larger NVLink domains, less power."""

from presage.studies.compute_study import compute_study
from presage.studies.domain_study import domain_study
from presage.studies.power_study import power_study
from presage.studies.scale_study import scale_study
from presage.studies.study_point import Point, Setup, Skipped, Study

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
