"""Studies of machines that are not built yet, and of noise: plans, slow nodes and hot racks."""

from presage.studies.noise_studies import hot_rack_study, noise_study, slow_node_study
from presage.studies.studies import compute_study, domain_study, power_study, scale_study
from presage.studies.study_point import SkippedPoint, Study, StudyPoint, StudySetup

__all__ = [
    "SkippedPoint",
    "Study",
    "StudyPoint",
    "StudySetup",
    "compute_study",
    "domain_study",
    "hot_rack_study",
    "noise_study",
    "power_study",
    "scale_study",
    "slow_node_study",
]
