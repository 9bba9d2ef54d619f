"""Steps that differ about as much as those of MLPerf's runs of Llama 3.1 405B."""

from presage.noise.distribution import LogNormal
from presage.noise.model import Stalls
from presage.runs.steps import StepTimes

USUAL = StepTimes(
    1.0,
    run_sd=0.005,
    drift=0.009,
    drift_sd=0.005,
    sd=0.005,
    correlation=0.6,
    stalls=Stalls(2.8e-3, LogNormal(3.0, 0.99)),
)
