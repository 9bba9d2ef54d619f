"""Higher-order ops during a capture: `torch.cond`, `while_loop` and `flex_attention` with the functions they are given.

Compiled, `flex_attention` is one kernel each way that skips the blocks its mask leaves out: it is recorded as flash
attention over as many keys as each query sees. Not compiled, PyTorch writes it out, scores and all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from presage.capture import compiled
from presage.capture.attention import LOW
from presage.capture.contents import current_recorder, unrecorded
from presage.errors import PresageError
from presage.fusing.inductor import INDUCTOR

aten = torch.ops.aten
_call: Any = HigherOrderOperator.__call__
BLOCK = 128  # queries that a kernel works on at a time
# Compiled flex_attention against flash attention with as many keys, and a block with a mask inside against a full one:
# measured on an H200 for windows of 1 to 383 blocks (data/h200_compiled.json).
FORWARD_PACE, BACKWARD_PACE, MASKED = 1.45, 1.9, 1.5
SAMPLED = 64  # positions of queries and of keys at which a mask is looked at where its blocks are not known
MOST_ROUNDS = 10_000


def higher_order_patches() -> list[tuple[Any, str, Any]]:
    return [(HigherOrderOperator, "__call__", _run)]


def _run(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    handler = HANDLERS.get(op.name())
    if handler is not None:
        return handler(*args, **kwargs)
    try:
        return _call(op, *args, **kwargs)
    except (NotImplementedError, RuntimeError) as e:
        if "rule registered for HigherOrderOperator" not in str(e):
            raise
        raise PresageError(
            f"the higher-order op {op.name()} cannot be captured: write it as plain PyTorch (a loop or an if) for the "
            "capture"
        ) from e


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, additional: Any = ()) -> Any:
    for _ in range(MOST_ROUNDS):
        if not bool(cond_fn(*carried, *additional)):
            return carried
        out = body_fn(*carried, *additional)
        carried = tuple(out) if isinstance(out, list | tuple) else (out,)
    raise PresageError(f"a while_loop did not end within {MOST_ROUNDS:,} rounds of the capture")


def _invoke(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _invoke_named(function: Callable[..., Any], _identifier: Any, *args: Any) -> Any:
    return function(*args)


# ---- flex_attention


def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    if INDUCTOR not in compiled.calls.label:
        compiled.calls.notes[
            "flex_attention is not compiled here: it writes out all scores (torch.compile(flex_attention) does not)"
        ] = None
        out = _written_out(q, k, v, score_mod, block_mask[-1], scale)
    else:
        with unrecorded() as recorder:
            seen, masked = _share_seen(recorder, block_mask, q.shape[-2], k.shape[-2])
        keys = max(1, round(k.shape[-2] * seen))
        compiled.calls.notes[
            f"flex_attention is modelled as flash attention over the {100 * seen:.2g}% of keys that its mask leaves a "
            "query in this step (windows that grow in training are longer later)"
        ] = None
        if _has_parameters(score_mod):
            compiled.calls.notes["the gradients of what flex_attention's score_mod captures are not modelled"] = None
        out = _FlexAttention.apply(q, k, v, keys, scale, 1 + (MASKED - 1) * masked)  # type: ignore[no-untyped-call]
    rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return out, rows, rows


@contextmanager
def _times_as_fast(factor: float) -> Iterator[None]:
    """Kernels inside are so many times as fast as those they are recorded as."""
    recorder = current_recorder()
    if recorder is not None:
        recorder.speed = factor
    try:
        yield
    finally:
        if recorder is not None:
            recorder.speed = 1.0


def _share_seen(recorder: Any, block_mask: tuple[Any, ...], queries: int, keys: int) -> tuple[float, float]:
    """The share of blocks of keys that a block of queries is computed with, and the share of these that are masked."""
    number, full, size, mask_mod = block_mask[2], block_mask[4], block_mask[-2], block_mask[-1]
    if size > keys:  # one block: no mask
        return 1.0, 0.0
    blocks = number.numel() * -(-keys // size)
    totals = [_known(recorder, x.clamp(min=0).sum()) for x in (number, full) if x is not None]
    if None not in totals:
        total = sum(float(n or 0) for n in totals)
        return min(1.0, total / blocks), float(totals[0] or 0) / max(total, 1.0)
    q = torch.arange(0, queries, max(1, queries // SAMPLED), device=number.device)
    k = torch.arange(0, keys, max(1, keys // SAMPLED), device=number.device)
    zero = torch.zeros((), dtype=torch.long, device=number.device)
    seen = mask_mod(zero, zero, q[:, None], k[None, :])
    share = _known(recorder, seen.float().mean()) if isinstance(seen, torch.Tensor) else None
    if share is None:
        compiled.calls.notes["the blocks of a flex_attention mask are not known: all are taken to be computed"] = None
        return 1.0, 0.0
    return float(share), 0.0


def _known(recorder: Any, scalar: torch.Tensor) -> float | None:
    """A number of the fake GPU, where it follows from what is known."""
    numbers = recorder.shadows.numbers(scalar) if recorder is not None else None
    return None if numbers is None or numbers.assumed else float(numbers.data)


def _has_parameters(function: Any) -> bool:
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in cells)


def _written_out(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, scale: float) -> torch.Tensor:
    """As PyTorch runs it uncompiled: with all scores, in float32."""
    k, v = _for_each_head([k, v], q)
    scores = (q @ k.transpose(-2, -1)).float() * scale
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if d == p else 1 for d in range(4)])
        for p, n in enumerate(scores.shape)
    )
    scores = score_mod(scores, b, h, i, j)
    scores = torch.where(mask_mod(b, h, i, j), scores, -float("inf"))
    return (scores.softmax(-1).to(q.dtype)) @ v  # type: ignore[no-any-return]


def _for_each_head(tensors: list[torch.Tensor], q: torch.Tensor) -> list[torch.Tensor]:
    heads = q.shape[1] // tensors[0].shape[1]
    return [t.repeat_interleave(heads, dim=1) for t in tensors] if heads > 1 else tensors


class _FlexAttention(torch.autograd.Function):
    """The fused kernels, on as many keys as a query sees: as many small attentions as there are blocks of queries."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, keys: int, scale: float, slower: float) -> torch.Tensor:
        with torch.enable_grad():  # its op is part of the forward pass
            own, few = _blocks(q.detach(), [x.detach() for x in (k, v)], keys)
            if q.dtype in LOW and max(q.shape[-1], v.shape[-1]) <= 256 and q.shape[-1] == v.shape[-1]:
                with _times_as_fast(FORWARD_PACE / slower):
                    made = aten._scaled_dot_product_flash_attention(own, *few, 0.0, False, False, scale=scale)
            else:
                few = _for_each_head(few, own)
                made = aten._scaled_dot_product_efficient_attention(own, *few, None, True, 0.0, False, scale=scale)
        ctx.keys, ctx.scale, ctx.slower, ctx.made = keys, scale, slower, made[1:]
        ctx.save_for_backward(q, k, v, made[0])
        out = made[0].transpose(1, 2)
        return out.reshape(q.shape[0], q.shape[2], *out.shape[2:]).transpose(1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        own, few = _blocks(q, [k, v], ctx.keys)
        grad = _blocks(grad, [], ctx.keys)[0] if own.shape[0] != q.shape[0] else grad
        grad = grad if grad.shape == out.shape else torch.empty_like(out)
        if len(ctx.made) > 4:
            lse, cum_q, cum_k, longest_q, longest_k, seed, offset = ctx.made[:7]
            lengths = lse, cum_q, cum_k, longest_q, longest_k
            with _times_as_fast(BACKWARD_PACE / ctx.slower):
                aten._scaled_dot_product_flash_attention_backward(
                    grad, own, *few, out, *lengths, 0.0, False, seed, offset, scale=ctx.scale
                )
        else:
            lse, seed, offset = ctx.made[:3]
            few = _for_each_head(few, own)
            aten._scaled_dot_product_efficient_attention_backward(
                grad, own, *few, None, out, lse, seed, offset, 0.0, [True, True, True, False], False, scale=ctx.scale
            )
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None


def _blocks(q: Any, others: list[Any], keys: int) -> tuple[Any, list[Any]]:
    """Blocks of queries, each with its keys, as a batch; the whole where memory does not lie so."""
    few = [x[:, :, :keys] for x in others]
    count = q.shape[2] // BLOCK
    if q.shape[2] % BLOCK or count < 2:
        return q, few
    rows = q.transpose(1, 2)
    if rows.stride(0) == rows.shape[1] * rows.stride(1):
        own = rows.view(q.shape[0] * count, BLOCK, *rows.shape[2:]).transpose(1, 2)
    elif q.shape[0] == 1:
        own = q[0].unflatten(1, (count, BLOCK)).transpose(0, 1)
    else:
        return q, few
    return own, [x[:1].expand(own.shape[0], *x.shape[1:]) for x in few]


HANDLERS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "flex_attention": _flex,
    "invoke_subgraph": _invoke_named,
    "tag_activation_checkpoint": _invoke,
    "wrap_activation_checkpoint": _invoke,
    "wrap": _invoke,
}
