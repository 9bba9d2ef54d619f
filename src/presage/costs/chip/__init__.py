"""Closed laws of the kernels of transformer training, quick enough to price thousands of plans a second."""

from presage.costs.chip.chip import Chip

__all__ = ["Chip"]
