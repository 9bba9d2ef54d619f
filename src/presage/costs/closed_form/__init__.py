"""Closed laws of the kernels of transformer training, quick enough to price thousands of plans a second."""

from presage.costs.closed_form.kernels import Chip

__all__ = ["Chip"]
