"""A job's step as a distribution: its pipeline drawn through the engine, replicas folded by order statistics."""

from presage.prediction.draws.distribution import StepDistribution, step_distribution
from presage.prediction.draws.draw import DrawRequest, Draws, draw, draw_all, without_fitted_stragglers
from presage.prediction.draws.step_model import StepModel, scale_class, step_model

__all__ = [
    "DrawRequest",
    "Draws",
    "StepDistribution",
    "StepModel",
    "draw",
    "draw_all",
    "scale_class",
    "step_distribution",
    "step_model",
    "without_fitted_stragglers",
]
