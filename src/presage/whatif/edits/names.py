"""Names of edits as people write them: other names for the same, and several in one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

__all__ = ["ALIASES", "near", "pieces"]

ALIASES = {
    "fused_optimizer": "fused_adam",
    "foreach_optimizer": "foreach_adam",
    "joined_tables": "table_batched",
    "tbe": "table_batched",
    "sdpa": "fused_attention",
    "flash_attention": "fused_attention",
    "torch_compile": "compile",
    "autocast_bf16": "autocast",
    "amp": "autocast",
    "cuda_graphs": "cuda_graph",
    "remove_sync": "no_sync",
}


def pieces(text: str, begins: Callable[[str], bool]) -> list[tuple[str, str]]:
    """`NAME=VALUE,NAME,...` as names (aliases resolved) and values. `begins` tells whether a name is an edit's.

    A piece after a comma that does not begin with an edit's name belongs to the value before it.
    """
    found: list[str] = []
    for piece in text.split(","):
        name = piece.partition("=")[0].strip()
        if not found or "=" not in found[-1] or name in ALIASES or begins(name):
            found.append(piece.strip())
        else:
            found[-1] += f",{piece}"
    split = (piece.partition("=") for piece in found if piece)
    return [(ALIASES.get(name.strip(), name.strip()), value.strip()) for name, _, value in split]


def near(name: str, known: Iterable[str]) -> str:
    """' (near it: ...)', where there are names like this one."""
    found = get_close_matches(name, [*known], n=3, cutoff=0.5)
    return f" (near it: {', '.join(found)})" if found else ""
