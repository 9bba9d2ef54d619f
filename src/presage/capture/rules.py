"""Which ops CUDA's code for an op runs, by the op's name. An op without a rule is its own single leaf."""

from __future__ import annotations

from presage.capture import rules_foreach, rules_index, rules_layers, rules_math, rules_memory
from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule

__all__ = ["lower"]

RULES: dict[str, Rule] = (
    rules_memory.RULES | rules_math.RULES | rules_layers.RULES | rules_index.RULES | rules_foreach.RULES
)
HOST = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::resize_", "aten::set_", "aten::as_strided", "aten::lift_fresh", "aten::detach_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::t_", "aten::transpose_", "aten::as_strided_", "aten::_unsafe_view",
    "aten::_reshape_alias", "aten::alias", "aten::_coalesced_", "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::is_coalesced", "aten::sparse_dim", "aten::dense_dim", "aten::_nnz", "aten::record_stream",
}  # fmt: skip


def lower(builder: CallLowering, call: RecordedCall) -> None:
    """Add the ops of one call."""
    if call.host:
        builder.same(kernels=False)
        return
    rule = RULES.get(call.name)
    if rule is not None and not call.opaque:
        rule(builder, call)
    else:
        builder.same(kernels=not call.view and call.name not in HOST)
