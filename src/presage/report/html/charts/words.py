"""Names as charts show them."""

from __future__ import annotations

from presage.text import shorten

__all__ = ["label"]

CODES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def label(text: str, width: int = 70) -> str:
    """A name that is shown as it is: a chart would take <float> for a tag. Cut in the middle where it is long."""
    return shorten(" ".join(text.split()), width).translate(CODES)
