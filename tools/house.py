"""The rules of the house, as a report: `python tools/house.py [ROOM...]` prints sizes and what breaks a rule.

tests/test_house.py holds the package to them. A room is a folder of src/presage (or a module beside them).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
# A room imports from its own layer's left only; rooms of one layer do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "text"),
    ("displayed", "files", "usercode"),
    ("examples", "pool", "scripts"),
    ("hardware",),
    ("graph",),
    ("engine",),
    ("noise",),
    ("parallel",),
    ("configs",),
    ("costs",),
    ("memory", "fusing"),
    ("capture", "traces"),
    ("prediction",),
    ("embeddings", "runs"),
    ("search", "placement", "whatif"),
    ("studies", "edits"),
    ("adapters",),
    ("measure",),
    ("calibrate",),
    ("report",),
    ("ui",),
    ("cli",),
    ("__main__",),
)
OUTSIDE = ("presage_fit", "presage_validation")  # packages that the runtime never imports
RANK = {room: k for k, rooms in enumerate(LAYERS) for room in rooms}
TARGET = {"runtime lines": 55_000, "runtime files": 380, "all lines": 64_000}
CEILING = {"runtime lines": 86_400, "runtime files": 503, "all lines": 106_500}  # lower it with every cut
BANNED = {"told", "said", "asked", "sure", "made", "took", "some", "mine", "beside", "lively", "calmed", "but"}
LONGEST_FUNCTION, LONGEST_MODULE, PARAMETERS = 60, 400, 8


@cache
def modules() -> dict[str, Path]:
    """Every module of src by its dotted name."""
    out = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(module: str) -> str:
    """'prediction' of presage.prediction.step; the package's name outside the runtime."""
    parts = module.split(".")
    return parts[0] if parts[0] in OUTSIDE or len(parts) == 1 else parts[1]


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of src that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                full = f"{node.module}.{a.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)


def room_graph() -> dict[tuple[str, str], list[str]]:
    """(room, imported room) -> the modules that do it."""
    known = modules()
    out: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, path in known.items():
        for other in imports(path, known):
            if room(name) != room(other) and "presage" not in (name, other):
                out[room(name), room(other)].append(f"{name} -> {other}")
    return out


def layer_violations() -> list[str]:
    """Imports to the right in LAYERS, and of fitting or validation by the runtime."""
    out = []
    for (a, b), where in sorted(room_graph().items()):
        if a in OUTSIDE:
            wrong = a == "presage_fit" and b == "presage_validation"
        else:
            wrong = b in OUTSIDE or RANK.get(b, 99) >= RANK.get(a, -1)
        out += where if wrong else []
    return out


@cache
def definitions() -> tuple[tuple[str, Path, ast.AST], ...]:
    """Every class and function of src."""
    return tuple(_definitions())


def _definitions() -> Iterator[tuple[str, Path, ast.AST]]:
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, path, node


def repeated_classes() -> dict[str, list[str]]:
    """Public class names that stand for more than one class."""
    seen: dict[str, list[str]] = defaultdict(list)
    for name, _, node in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            seen[node.name].append(name)
    return {k: v for k, v in sorted(seen.items()) if len(v) > 1}


def wording() -> list[str]:
    """Docstrings that begin with "Of", and banned words as names of functions, classes and modules."""
    out = []
    for name, _, node in definitions():
        doc = ast.get_docstring(node) or ""
        if re.match(r"Of\b", doc):
            out.append(f'{name}:{node.lineno} {node.name}: docstring begins with "Of"')
        if node.name.lstrip("_") in BANNED:
            out.append(f"{name}:{node.lineno} {node.name}: not a word of the glossary")
    return out


def sizes() -> list[str]:
    """Functions and modules that are too long, functions with too many parameters (outside cli)."""
    out = []
    for name, path in modules().items():
        n = len(path.read_text().splitlines())
        if n > LONGEST_MODULE:
            out.append(f"{name}: {n} lines")
    for name, _, node in definitions():
        if isinstance(node, ast.ClassDef):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        if length > LONGEST_FUNCTION:
            out.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    return out


def totals() -> tuple[Counter[str], Counter[str]]:
    """Lines and files by room."""
    lines, files = Counter[str](), Counter[str]()
    for name, path in modules().items():
        lines[room(name)] += len(path.read_text().splitlines())
        files[room(name)] += 1
    return lines, files


def main() -> None:
    wanted = sys.argv[1:]
    lines, files = totals()
    if not wanted:
        for r, n in lines.most_common():
            print(f"{r:20} {n:7,} lines {files[r]:4} files")
    outside = sum(lines[r] for r in OUTSIDE), sum(files[r] for r in OUTSIDE)
    total, count = sum(lines.values()), sum(files.values())
    print(f"runtime {total - outside[0]:,} lines, {count - outside[1]} files; all {total:,}")
    print(f"target {TARGET}")
    repeated = [f"class {k}: {', '.join(v)}" for k, v in repeated_classes().items()]
    for title, found in (
        ("layers", layer_violations()),
        ("classes", repeated),
        ("wording", wording()),
        ("sizes", sizes()),
    ):
        mine = [x for x in found if not wanted or any(f"presage.{w}" in x or w in x.split(".")[0] for w in wanted)]
        print(f"\n{title}: {len(found)} in all")
        for x in mine[:400]:
            print("   ", x)


if __name__ == "__main__":
    main()
