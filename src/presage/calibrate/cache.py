"""How long what was written stays in the L2 cache: write a tensor, read or write others, read it again."""

from __future__ import annotations

import statistics
from typing import Any

from presage.calibrate.measure import exported, read_batch

SIZES = [s << 20 for s in (1, 4, 12, 24)]
BETWEEN = [d << 20 for d in (0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)]
REPEATS = 4


def reuse(torch: Any) -> list[dict[str, Any]]:
    """For each size and distance: microseconds to read the tensor again into a small result, by what was between."""
    from torch.profiler import ProfilerActivity, profile, record_function

    other = torch.zeros(max(BETWEEN) // 4, device="cuda", dtype=torch.int32)
    cases = [(s, d, how) for s in SIZES for d in BETWEEN for how in ("written", "read")]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        for n, (size, between, how) in enumerate(cases):
            x = torch.randn(size // 4, device="cuda")
            y = torch.empty_like(x)
            for k in range(REPEATS + 1):
                x.mul_(1.0)
                if between:
                    part = other[: between // 4]
                    part.bitwise_not_() if how == "written" else part.sum()
                with record_function(f"#{n}#warm#{k}"):
                    torch.neg(x, out=y)
        torch.cuda.synchronize()
    rows = _rows(prof, len(cases))
    return [
        {"bytes": s, "between": d, "how": how, "us": rows[str(n)]}
        for n, (s, d, how) in enumerate(cases)
        if rows[str(n)] is not None
    ]


def _rows(prof: Any, count: int) -> dict[str, float | None]:
    found = read_batch(exported(prof), [str(n) for n in range(count)])
    return {n: statistics.median(r["us"] for r in rows) if rows else None for n, rows in found.items()}
