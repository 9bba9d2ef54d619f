"""Closed-form kernel laws: ClosedFormKernels prices the ops of a graph thousands of times a second."""

from presage.costs.closed_form.attention_law import AttentionShape
from presage.costs.closed_form.gemm_law import GemmShape
from presage.costs.closed_form.kernels import ClosedFormKernels

__all__ = ["AttentionShape", "ClosedFormKernels", "GemmShape"]
