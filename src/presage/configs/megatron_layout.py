"""How Megatron writes down which layers are where: patterns of experts, layouts of a pipeline."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from presage.errors import InputError

__all__ = ["expert_layers", "pipeline_layout"]

PART = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")
LAYERS = 4096  # more than any model has


def expert_layers(pattern: str, layers: int, path: str | Path) -> tuple[int, int]:
    """How many layers at the start have no experts, and of the others every how many: from 2, or ([0]*3+[1]*58)."""
    text = pattern.replace(" ", "").strip("\"'")
    if text.isdigit() and int(text):
        return 0, int(text)
    parts = PART.findall(text)
    if not parts or re.sub(r"[()+]", "", PART.sub("", text)) or any(int(n or 1) > LAYERS for _, n in parts):
        raise InputError(path, f"is {pattern!r}: it should be like 2 or ([0]*3+[1]*58)", "--moe-layer-freq")
    kinds = [int(bit) for bits, times in parts for _ in range(int(times or 1)) for bit in bits.split(",")]
    if text.startswith("([") and (again := re.search(r"\)\*(\d+)$", text)):
        kinds *= min(int(again[1]), LAYERS)
    with_experts = [i for i, kind in enumerate(kinds[:layers]) if kind]
    if not with_experts:
        return layers, 1
    steps = {b - a for a, b in pairwise(with_experts)}
    return with_experts[0], min(steps, default=1)


def pipeline_layout(text: str, path: str | Path) -> list[int]:
    """Layers of each part of a layout like Et*3|(tt|)*29,m|L: E embedding, t layer, m further-token layer, L loss."""
    flat = _flat(text.replace(" ", "").replace(",", "").strip("\"'"), path)
    if re.search(r"[^EtmL|]", flat):
        raise InputError(path, f"is {text!r}: it should be like Ettt|(tt|)*29|tL", "--pipeline-model-parallel-layout")
    return [part.count("t") for part in flat.removesuffix("|").split("|")]


def _flat(text: str, path: str | Path) -> str:
    """Without repetitions: (tt|)*2 is tt|tt|, t*3 is ttt."""
    for _ in range(32):
        again = re.sub(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)", _repeated, text)
        again = re.sub(r"\(([^()*]*)\)(?!\*)", r"\1", again)
        if again == text:
            return text
        text = again
        if len(text) > 16 * LAYERS:
            break
    raise InputError(path, "repeats itself without end", "--pipeline-model-parallel-layout")


def _repeated(found: re.Match[str]) -> str:
    what, times = (found[1], found[2]) if found[2] else (found[3], found[4])
    return what * min(int(times), LAYERS)
