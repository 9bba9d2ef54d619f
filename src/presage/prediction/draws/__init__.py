"""A job's step as a distribution: its pipeline drawn through the engine, replicas folded by order statistics."""

from presage.prediction.draws.draw import Draws, calmed
from presage.prediction.draws.draw_request import Asked, draw, draw_all
from presage.prediction.draws.guarantee import Guarantee, guarantee
from presage.prediction.draws.step_model import Shape, scaled, shape_of

__all__ = ["Asked", "Draws", "Guarantee", "Shape", "calmed", "draw", "draw_all", "guarantee", "scaled", "shape_of"]
