"""--fail-if: conditions over an answer's JSON."""

from __future__ import annotations

from typing import Any

import pytest

from presage.cli.conditions import holds
from presage.errors import PresageError

pytestmark = pytest.mark.usefixtures("few_draws")

DATA: dict[str, Any] = {
    "fits": True,
    "bound": "gpu",
    "step_ms": {"p50": 35.25, "p95": 37.6},
    "peak_memory_bytes": 13e9,
    "mfu": 0.53,
    "days": {"p50": 50.0},
    "memory": {"margin_bytes": 5e9, "peak_bytes": 1e9},
    "a": {"x": 1},
    "b": {"x": 2},
    "price": None,
    "gpu": "NVIDIA H200",
    "modules": {"blocks.0": {"ms": 3.5}, "(top level)": {"ms": 1.0}},
    "torch.version": 2,
}


@pytest.mark.parametrize(
    "condition",
    [
        "fits",
        "not not fits",
        "p95 > 37ms",
        "p95 > 37",  # in the JSON's own unit
        "step_ms.p95 < 0.04 s",
        "37 < p95 < 38",
        "peak_memory_bytes > 12 GB and peak_memory_bytes < 13GiB",
        "margin_bytes > 4GiB",
        "memory.margin_bytes == 5GB",
        "mfu > 50%",
        "bound == 'gpu'",
        "p95 / p50 > 1.05",
        "p95 - p50 > 2ms",
        "days.p50 < 51 days",
        "days.p50 < 51",
        "a.x == 1 or b.x == 3",
        'modules."blocks.0".ms > 3ms',
        "modules.'(top level)'.ms <= 1",
        '"blocks.0".ms == 3.5 and "torch.version" == 2',
        'bound == "gpu"',  # a plain word in quotes is a text, though there is such a key
        "bound != '40 ms'",
    ],
)
def test_conditions_that_hold(condition: str) -> None:
    assert holds(condition, DATA)
    assert not holds(f"not ({condition})", DATA)


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("p95", "not a condition"),
        ("p59 > 40ms", "did you mean"),
        ("x == 1", "several places: say a.x, b.x"),
        ("p95 >", "cannot be read"),
        ('modules."blocks.1".ms > 3', 'no modules."blocks.1".ms in'),
        ('modules."blocks.0" > 3', 'modules."blocks.0" is not a single value; name one of ms'),
        ("p95 > 40GB", "a time with a size"),
        ("__import__('os')", "functions are not known"),
        ("[1]", "only names"),
        ("fits > 1", "not a number"),
        ("memory > 1", "name one of margin_bytes"),
        ("price > 1", "unknown"),
        ("p95 ** 9 > 1", "of operators"),
        ("1 / 0 > 1", "zero"),
        ("(" * 300 + "fits" + ")" * 300, "cannot be read"),
        ("1 < 2 and " * 400 + "fits", "longer than"),
    ],
)
def test_mistakes_are_told(condition: str, why: str) -> None:
    with pytest.raises(PresageError, match="--fail-if") as caught:
        holds(condition, DATA)
    assert why in str(caught.value)
