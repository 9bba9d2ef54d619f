"""What kind of work an op does: the groups people think in."""

from __future__ import annotations

import re
from functools import cache

FAMILIES = (
    "matrix multiply", "convolution", "attention", "recurrent", "embedding", "normalisation", "softmax and loss",
    "optimizer", "copy and cast", "index", "reduction", "random", "communication", "fused", "elementwise", "other",
)  # fmt: skip

# The first that matches has it: an op's family is in its name.
_PATTERNS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("fused", r"^(triton|fused)::"),
        ("communication", r"^(c10d|_c10d_functional|nccl|record_param_comms)"),
        ("attention", r"attention|flash_attn"),
        ("embedding", r"embedding"),
        ("convolution", r"conv"),
        ("recurrent", r"_rnn|lstm|gru"),
        ("normalisation", r"_norm(_|$)(?!al)|layer_norm|batch_norm|group_norm|rms_norm"),
        ("softmax and loss", r"softmax|nll_loss|cross_entropy|_loss(_|$)|logsumexp"),
        ("optimizer", r"_fused_(adam|adamw|sgd|adagrad)|_foreach_(?!copy)"),
        ("random", r"dropout|normal_|uniform_|random|rand|bernoulli|multinomial"),
        ("copy and cast", r"copy|clone|^aten::cat$|fill_|zero_|^aten::stack$|contiguous|memcpy"),
        ("index", r"index|gather|scatter|nonzero|sort|topk|masked_select|unique|take|searchsorted|coalesce|slice_"),
        ("reduction", r"^aten::(sum|mean|max|min|prod|var|std|any|all|norm|amax|amin|argmax|argmin|cumsum|linalg_v)"),
    )
)
_MATRIX = re.compile(r"mm(_|$)|addmv|::mv$|::v?dot$|::linear$")


@cache
def family(name: str) -> str:
    """The family of an op, by its name; an op of no known library is 'other'."""
    for result, pattern in _PATTERNS:
        if pattern.search(name):
            return result
    if _MATRIX.search(name):
        return "matrix multiply"
    return "elementwise" if name.startswith("aten::") else "other"
