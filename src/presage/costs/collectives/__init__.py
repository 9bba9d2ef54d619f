"""What collectives take: a law from link facts, corrected where tables were measured."""

from presage.costs.collectives.group import OPS, RankGroup, volume
from presage.costs.collectives.model import Collectives

__all__ = ["OPS", "Collectives", "RankGroup", "volume"]
