"""A job's step as a distribution: its pipeline drawn through the engine, replicas folded by order statistics."""

from presage.jobs.draws.draw import Draws, calmed, draw
from presage.jobs.draws.guarantee import Guarantee, guarantee
from presage.jobs.draws.shape import Shape, scaled, shape_of

__all__ = ["Draws", "Guarantee", "Shape", "calmed", "draw", "guarantee", "scaled", "shape_of"]
