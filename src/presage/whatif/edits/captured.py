"""Edits made by capturing the step again: dtypes, layouts, optimizers, attention, checkpoints, microbatches."""

from __future__ import annotations

from presage.capture.variants import Variant
from presage.errors import PresageError, compile_pattern
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.whatif.edits.edit import CaptureEdit, plain, valued

LOW = ("bfloat16", "float16")
PRODUCTS = ("matrix multiply", "convolution", "recurrent")
CONVOLUTIONS = ("aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::_conv_depthwise2d")
LISTED, FUSED = "aten::_foreach_", "aten::_fused_"


def autocast(dtype: str = "bfloat16") -> CaptureEdit:
    """The forward pass under `torch.autocast("cuda", dtype)`."""
    name = {"": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(dtype, dtype)
    if name not in LOW:
        raise PresageError(f"autocast takes bfloat16 or float16, but {dtype!r} was given: write autocast=bfloat16")
    nothing = "no product, convolution or attention of the forward pass is in float32"
    return CaptureEdit("autocast", Variant(autocast=name), nothing, _has_float32_products)


def checkpoint(pattern: str = "") -> CaptureEdit:
    """Checkpoints of the modules whose names match; of the repeated blocks by default."""
    compile_pattern(pattern)
    nothing = "no module that keeps activations for the backward pass and is not checkpointed already"
    return CaptureEdit("checkpoint", Variant(checkpoint=pattern), nothing, _has_backward)


def accumulate(microbatches: int) -> CaptureEdit:
    """The step with so many microbatches of the size it has."""
    if microbatches < 2:
        raise PresageError(f"{microbatches} microbatches accumulate nothing: 2 or more do")
    nothing = "no backward pass that could run more than once before the optimizer"
    return CaptureEdit("accumulate", Variant(accumulate=microbatches), nothing, _has_backward)


def _microbatches(value: str) -> CaptureEdit:
    if not value.isdecimal() or int(value) < 2:
        raise PresageError(f"accumulate={value} is not a number of microbatches: write 2 or more, as in accumulate=4")
    return accumulate(int(value))


def _inputs(graph: Graph, op: Op) -> set[str]:
    return {t.dtype for t in graph.inputs_of(op)}


def _has_float32_products(graph: Graph) -> bool:
    kinds = (*PRODUCTS, "attention")
    forward = (op for op in graph.ops if op.kernels and op.phase == "forward" and family(op.name) in kinds)
    return any("float32" in _inputs(graph, op) for op in forward)


def _gains_by_tf32(graph: Graph) -> bool:
    """Whether a product or convolution of float32 numbers does not use TF32."""
    flags = {name: "allow_tf32" if name == "matrix multiply" else "cudnn.allow_tf32" for name in PRODUCTS}
    products = (op for op in graph.ops if op.kernels and family(op.name) in PRODUCTS)
    return any(not graph.flags.get(flags[family(op.name)]) and "float32" in _inputs(graph, op) for op in products)


def _has_float32_parameters(graph: Graph) -> bool:
    return any(graph.storages[t.storage].role == "parameter" and t.dtype == "float32" for t in graph.tensors)


def _has_convolutions(graph: Graph) -> bool:
    return any(op.name in CONVOLUTIONS and len(graph.inputs_of(op)[1].shape) == 4 for op in graph.ops)


def _has_softmax(graph: Graph) -> bool:
    return any(op.name == "aten::_softmax" for op in graph.ops)


def _has_backward(graph: Graph) -> bool:
    return any(op.thread == "autograd" for op in graph.ops)


def _has_unfused(graph: Graph) -> bool:
    return any(op.phase == "optimizer" and op.kernels and not op.name.startswith(FUSED) for op in graph.ops)


def _has_loop(graph: Graph) -> bool:
    return any(op.phase == "optimizer" and op.kernels and not op.name.startswith((FUSED, LISTED)) for op in graph.ops)


tf32 = CaptureEdit(
    "tf32",
    Variant(tf32=True),
    "TF32 is on already, or no product or convolution is of float32 numbers",
    _gains_by_tf32,
)
bf16 = CaptureEdit("bf16", Variant(dtype="bfloat16"), "no parameter is float32", _has_float32_parameters)
channels_last = CaptureEdit(
    "channels_last",
    Variant(channels_last=True),
    "no convolution over two dimensions, or all have channels-last weights already",
    _has_convolutions,
)
fused_attention = CaptureEdit(
    "fused_attention",
    Variant(fused_attention=True),
    "no attention that is written out: a product of queries and keys, a softmax, and a product of its result with "
    "values",
    _has_softmax,
)
fused_adam = CaptureEdit(
    "fused_adam",
    Variant(optimizer="fused"),
    "no update of torch's Adam, AdamW, SGD or Adagrad with dense gradients that is not fused already",
    _has_unfused,
)
foreach_adam = CaptureEdit(
    "foreach_adam",
    Variant(optimizer="foreach"),
    "no optimizer of torch's with dense gradients that goes through its parameters one by one",
    _has_loop,
)

EDITS = (
    plain(
        "fused_adam",
        "torch's Adam, AdamW, SGD and Adagrad with fused=True: one op for all parameters of a group and dtype, step "
        "counts on the GPU; a gradient scaler no longer waits for the GPU. Not for sparse gradients or other "
        "optimizers.",
        fused_adam,
    ),
    plain(
        "foreach_adam",
        "torch's optimizers with foreach=True: ops on lists of all parameters of a group and dtype, with the "
        "temporaries that takes, instead of one parameter after the other (foreach=False).",
        foreach_adam,
    ),
    valued(
        "checkpoint",
        "Modules whose name matches (by default the repeated blocks, as blocks.0 and blocks.1) keep only their inputs; "
        "what their backward pass needs is computed again when it comes to it, as torch.utils.checkpoint does with "
        "use_reentrant=False. Less memory, more time.",
        "REGEX",
        checkpoint,
        tried=("",),
        needed=False,
    ),
    valued(
        "accumulate",
        "Forward and backward run K times, each time with a microbatch of the size the step has, before the optimizer "
        "runs once: from the second on, gradients are added to those there are. A step then has K times the samples.",
        "K",
        _microbatches,
        tried=("2",),
        caution="a step has more samples, so the learning rate's schedule goes with it",
    ),
    plain(
        "tf32",
        "Products and convolutions of float32 numbers use TF32 tensor cores (torch.backends.cuda.matmul.allow_tf32 and "
        "torch.backends.cudnn.allow_tf32): inputs are rounded to 10 bits of mantissa, all else stays float32.",
        tf32,
        caution="numbers change: products keep 11 bits of mantissa; check the loss",
    ),
    plain(
        "bf16",
        "The whole model in bfloat16: parameters, gradients, optimizer state and inputs, as model.to(torch.bfloat16) "
        "does it before the optimizer is made; autocast is switched off. Casts in the code itself stay.",
        bf16,
        caution="numbers change: weights and the optimizer's state keep 8 bits of mantissa; check the loss",
    ),
    valued(
        "autocast",
        "The forward pass under torch.autocast: products, convolutions and attention in bfloat16 (or float16), "
        "losses, norms and sums in float32, with the casts between them; weights are cast once a step, and gradients "
        "are cast back. Parameters and the optimizer stay float32; a float16 run would also need a scaler.",
        "bfloat16",
        autocast,
        tried=("",),
        needed=False,
        caution="numbers change: products have 8 bits of mantissa (float16: 11, with a scaler); check the loss",
    ),
    plain(
        "fused_attention",
        "Attention that is written out (product, scale, mask, softmax, dropout, product) becomes one call of "
        "scaled_dot_product_attention, by the kernel that PyTorch would pick. A mask that is the same for all samples "
        "and heads is taken to be causal.",
        fused_attention,
    ),
    plain(
        "channels_last",
        "Weights of convolutions and the pictures they are given in the channels_last memory format, as "
        "model.to(memory_format=torch.channels_last) and the same for the input do it: cuDNN's kernels for that "
        "layout, without the transposes around the others.",
        channels_last,
    ),
)
