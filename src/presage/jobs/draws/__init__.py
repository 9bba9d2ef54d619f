"""A job's step as a distribution: its pipeline drawn through the engine, replicas folded by order statistics."""

from presage.jobs.draws.draw import Draws, calmed
from presage.jobs.draws.guarantee import Guarantee, guarantee
from presage.jobs.draws.shape import Shape, scaled, shape_of
from presage.jobs.draws.together import Asked, draw, draw_all

__all__ = ["Asked", "Draws", "Guarantee", "Shape", "calmed", "draw", "draw_all", "guarantee", "scaled", "shape_of"]
