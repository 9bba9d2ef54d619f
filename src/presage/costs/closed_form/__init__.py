"""Closed-form kernel laws: ClosedFormKernels prices the ops of a graph thousands of times a second."""

from presage.costs.closed_form.kernels import ClosedFormKernels
from presage.costs.families.attention import AttentionShape
from presage.costs.families.gemm import GemmShape

__all__ = ["AttentionShape", "ClosedFormKernels", "GemmShape"]
