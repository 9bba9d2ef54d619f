"""What the host pays: time per small op with and without the profiler, in forward and backward; copies; syncs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def small_ops(torch: Any, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """Ops on tensors of the GPU, so small that only the host counts."""
    f = torch.nn.functional
    x, y = (torch.randn(64, 64, device=device) for _ in range(2))
    w, b = torch.randn(64, 64, device=device), torch.randn(64, device=device)
    h, k = torch.randn(4, 8, 16, 16, device=device), torch.randn(8, 8, 3, 3, device=device)
    i = torch.randint(0, 64, (32,), device=device)
    many = [torch.randn(64, device=device) for _ in range(30)]
    q = torch.randn(2, 4, 32, 64, device=device, dtype=torch.bfloat16)
    bn = torch.nn.BatchNorm2d(8, device=device)
    return {
        "aten::add": lambda: x + y,
        "aten::mul": lambda: x * y,
        "aten::add_": lambda: x.add_(y),
        "aten::relu": lambda: torch.relu(x),
        "aten::gelu": lambda: f.gelu(x),
        "aten::to": lambda: x.to(torch.bfloat16),
        "aten::mm": lambda: x @ y,
        "aten::linear": lambda: f.linear(x, w, b),
        "aten::bmm": lambda: torch.bmm(x[None], y[None]),
        "aten::layer_norm": lambda: f.layer_norm(x, (64,), b, b),
        "aten::softmax": lambda: x.softmax(-1),
        "aten::sum": lambda: x.sum(),
        "aten::mean": lambda: x.mean(-1),
        "aten::embedding": lambda: f.embedding(i, w),
        "aten::index": lambda: x[i],
        "aten::cat": lambda: torch.cat([x, y]),
        "aten::stack": lambda: torch.stack([x, y]),
        "aten::clone": lambda: x.clone(),
        "aten::contiguous": lambda: x.t().contiguous(),
        "aten::zeros": lambda: torch.zeros(64, device=device),
        "aten::empty": lambda: torch.empty(64, device=device),
        "aten::view": lambda: x.view(-1),
        "aten::transpose": lambda: x.transpose(0, 1),
        "aten::slice": lambda: x[:5],
        "aten::dropout": lambda: f.dropout(x, 0.1),
        "aten::conv2d": lambda: f.conv2d(h, k, padding=1),
        "aten::batch_norm": lambda: bn(h),
        "aten::max_pool2d": lambda: f.max_pool2d(h, 2),
        "aten::scaled_dot_product_attention": lambda: f.scaled_dot_product_attention(q, q, q),
        "aten::_foreach_add_": lambda: torch._foreach_add_(many, many),
        "aten::cross_entropy_loss": lambda: f.cross_entropy(x, i.repeat(2)),
    }


def _per_call(torch: Any, call: Callable[[], Any], calls: int = 300) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / calls


def host_costs(torch: Any) -> list[dict[str, Any]]:
    """Microseconds of host time per op, without and with the profiler, and per op of a backward pass."""
    from torch.profiler import ProfilerActivity, profile

    rows = []
    for name, call in small_ops(torch).items():
        plain = sorted(_per_call(torch, call) for _ in range(5))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True):
            profiled = _per_call(torch, call, 100)
        rows.append({"op": name, "us": [round(x, 3) for x in plain], "profiled_us": round(profiled, 3)})
    return rows + _backward_costs(torch)


def backward_ops(torch: Any, w: Any) -> dict[str, Callable[[Any], Any]]:
    """Ops to chain, by the name of their backward node; `w` is a matrix to multiply with."""
    return {
        "MulBackward0": lambda h: h * 1.01,
        "AddBackward0": lambda h: h + 1.0,
        "ReluBackward0": torch.relu,
        "GeluBackward0": torch.nn.functional.gelu,
        "MmBackward0": lambda h: h @ w,
        "NativeLayerNormBackward0": lambda h: torch.nn.functional.layer_norm(h, (64,)),
        "ViewBackward0": lambda h: h.view(64, 64),
        "SoftmaxBackward0": lambda h: h.softmax(-1),
    }


def _backward_costs(torch: Any) -> list[dict[str, Any]]:
    """A chain of 200 ops of one kind, run backwards: host time per op on the autograd thread."""
    x, w = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2))
    rows = []
    for name, step in backward_ops(torch, w).items():
        spent = []
        for _ in range(6):
            h = x
            for _ in range(200):
                h = step(h)
            loss = h.sum()
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss.backward()
            spent.append(1e6 * (time.perf_counter() - start) / 200)
            torch.cuda.synchronize()
            x.grad = w.grad = None
        rows.append({"op": name, "us": sorted(round(s, 3) for s in spent[1:]), "thread": "autograd"})
    return rows


def latencies(torch: Any) -> dict[str, Any]:
    """Microseconds: a synchronise with nothing to wait for, a launch and wait, .item()."""
    x = torch.ones(1, device="cuda")

    def timed(call: Callable[[], Any], count: int = 200) -> list[float]:
        out = []
        for _ in range(count):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            out.append(1e6 * (time.perf_counter() - start))
        out.sort()
        return [round(out[int(len(out) * q)], 3) for q in (0.1, 0.5, 0.9)]

    def launch_and_wait() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    return {
        "synchronize_us": timed(torch.cuda.synchronize),
        "launch_and_wait_us": timed(launch_and_wait),
        "item_us": timed(x.item),
        "kernel_pitch_us": [round(_pitch(torch, x), 3) for _ in range(5)],
    }


def _pitch(torch: Any, x: Any, count: int = 800) -> float:
    """Microseconds from one tiny kernel's start to the next one's, when all are queued behind a long one."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(100_000_000)
    marks[0].record()
    for _ in range(count):
        x.add_(1)
    marks[1].record()
    torch.cuda.synchronize()
    return float(1e3 * marks[0].elapsed_time(marks[1]) / count)


def copies(torch: Any) -> list[dict[str, Any]]:
    """Copies between host and device and within the device, by size."""
    rows = []
    for size in [1 << k for k in range(10, 31, 2)]:
        device, other = (torch.empty(size, device="cuda", dtype=torch.uint8) for _ in range(2))
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pairs = {"device": (other, device), "to_device_pinned": (device, pinned), "to_host_pinned": (pinned, device)}
        if size <= 1 << 28:
            pageable = torch.ones(size, dtype=torch.uint8)
            pairs |= {"to_device_pageable": (device, pageable), "to_host_pageable": (pageable, device)}
        for name, (target, source) in pairs.items():
            rows.append({"copy": name, "bytes": size, "us": _copy_times(torch, target, source)})
    return rows


def _copy_times(torch: Any, target: Any, source: Any) -> list[float]:
    spent = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        spent.append(round(1e6 * (time.perf_counter() - start), 2))
    return sorted(spent[1:])
