"""Studies of machines that are not built yet: more GPUs, faster ones, larger NVLink domains, less power."""

from presage.studies.studies import compute_study, domain_study, power_study, scale_study
from presage.studies.study_point import SkippedPoint, Study, StudyPoint, StudySetup

__all__ = [
    "SkippedPoint",
    "Study",
    "StudyPoint",
    "StudySetup",
    "compute_study",
    "domain_study",
    "power_study",
    "scale_study",
]
