"""Arguments (--name value) of a training script: shell, a plain list, JSON or YAML. Nothing in it is run.

A shell script's variables are followed as far as they are plain: assignments in order, ${NAME:-default}, whole-number
arithmetic in $((...)). Branches are not decided: all are read, and of two values the later is taken, with a note.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from presage.errors import InputError, PresageError
from presage.files.reading import parse_json, read_text

MOST = 256 << 10  # bytes of a script, and of what a variable in it becomes
MOST_VALUES = 100_000  # in a file of settings
MOST_NUMBER = 1e18
Arguments = dict[str, list[list[str]]]  # by name, with underscores: the values of each time it is given

CALLS = re.compile(r"`[^`]*`")
HEREDOC = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?")
COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
SBATCH = re.compile(r"^#SBATCH\s+--(nodes|gres|gpus-per-node|ntasks-per-node)[= ](\S+)", re.MULTILINE)
ASSIGNED = re.compile(
    r"(?:^|[\s;(])([A-Za-z_]\w*)=(\$\(\([^()]*(?:\([^()]*\)[^()]*)*\)\)|\"[^\"]*\"|'[^']*'|[^\s;\"'()]*)", re.MULTILINE
)
SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
USED = re.compile(r"--([A-Za-z][\w-]*)[ =]+['\"]?\$\{?(\w+)")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class Script(NamedTuple):
    """What is in a file."""

    arguments: Arguments
    variables: dict[str, str]
    unsure: dict[str, str]  # arguments whose variables are set more than once, to other values


def read_script(path: str | Path) -> Script:
    """The arguments of a file, and the variables it sets."""
    path = Path(path)
    text = read_text(path, MOST)
    try:
        return _structured(path, text) if path.suffix in (".json", ".yaml", ".yml") else shell(text)
    except InputError:
        raise
    except PresageError as e:
        raise InputError(path, str(e)) from e


# ---- JSON and YAML


def _structured(path: Path, text: str) -> Script:
    content = parse_json(text, path) if path.suffix == ".json" else _yaml(path, text)
    if isinstance(content, list):
        return shell(" ".join(map(str, content)))
    if not isinstance(content, dict):
        raise InputError(path, "is neither a list of arguments nor a table of them")
    out: Arguments = {}
    for name, value in _leaves(content):
        if value is not None:
            values = [] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)]
            out.setdefault(_named(name), []).append(values)
    return Script(out, {}, {})


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as e:
        raise InputError(path, "YAML needs pyyaml, which is not installed: give a shell script or JSON") from e
    try:
        content = yaml.safe_load(text)
        if _size(content, {}) > MOST_VALUES:
            raise InputError(path, f"has more than {MOST_VALUES:,} values, or refers to itself")
        return content
    except RecursionError as e:
        raise InputError(path, "is nested too deeply") from e
    except (yaml.YAMLError, ValueError, TypeError) as e:  # keys that cannot be, dates that are none
        raise InputError(path, f"is not YAML: {e}") from e


def _size(value: Any, known: dict[int, float]) -> float:
    """Number of values with every YAML alias expanded."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = inf  # until it is counted: one that holds itself has no end
        known[id(value)] = 1 + sum(_size(v, known) for v in (value.values() if isinstance(value, dict) else value))
    return known[id(value)]


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, of tables within tables too."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(name), value


# ---- settings by dotted names, as Hydra and OmegaConf have them

PAIR = re.compile(
    r"(?:^|(?<=[\s'\"]))\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(\"[^\"]*\"|'[^']*'|\$\(\([^\n]*?\)\)|[^\s'\"\\]*)"
)
QUOTED_DEFAULT = re.compile(r"(\$\{\w+:?[-=])\"([^\"\n]*)\"\}")
INSERTED = re.compile(r"\$\{([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*([^,{}]+),\s*([^,{}]+)\}")


def read_settings(path: str | Path) -> dict[str, Any]:
    """Settings of a file by dotted names: YAML, JSON, or key.name=value words of a script or a list."""
    path = Path(path)
    text = read_text(path, MOST)
    if path.suffix not in (".json", ".yaml", ".yml"):
        text = QUOTED_DEFAULT.sub(r"\1\2}", text)
        found = shell(text)
        text = COMMENT.sub("", text).replace("\\\n", " ")
        pairs = {f[1]: _plain(_expanded(f[2].strip("\"'"), found.variables)) for f in PAIR.finditer(text)}
        return {k: v for k, v in pairs.items() if v is not None}
    content = parse_json(text, path) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(content, dict):
        raise InputError(path, "is not a table of settings")
    return _dotted(content)


def resolve_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With ${other.name} and ${mul:a,b} in place."""
    out = dict(settings)
    for _ in range(8):
        for key, value in out.items():
            if isinstance(value, str) and "${" in value:
                text = INSERTED.sub(lambda f: str(out.get(f[1], f[0])), value)
                out[key] = _plain(PRODUCT.sub(_product, text))
    return out


def _product(found: re.Match[str]) -> str:
    try:
        return f"{number(found[1]) * number(found[2]):g}"
    except ValueError:
        return found[0]


def _dotted(table: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in table.items():
        out |= _dotted(value, f"{head}{name}.") if isinstance(value, Mapping) and value else {f"{head}{name}": value}
    return out


def _plain(text: Any) -> Any:
    """A word of a command line as a number, true, false or nothing."""
    known = {"true": True, "false": False, "null": None, "none": None, "": None}
    if not isinstance(text, str) or text.lower() in known:
        return known[text.lower()] if isinstance(text, str) else text
    try:
        value = number(text)
    except ValueError:
        return text
    return int(value) if value == int(value) else value


# ---- shell


def shell(text: str) -> Script:
    variables = _batch(text)
    text = COMMENT.sub("", _without_heredocs(text)).replace("\\\n", " ")
    text = CALLS.sub("", text)
    twice: set[str] = set()
    for match in ASSIGNED.finditer(text):
        name, value = match[1], " ".join(_expanded(match[2].strip("\"'"), variables).split())
        if not value.startswith("-"):  # not a list of arguments: those are found where they stand
            if variables.get(name, value) != value:
                twice.add(name)
            variables[name] = value
    unsure = {_named(a): v for a, v in USED.findall(text) if v in twice}
    return Script(_arguments(text, variables), variables, unsure)


def _without_heredocs(text: str) -> str:
    """Texts that a script holds for others: from <<WORD to the line that is WORD."""
    lines = text.split("\n")
    ends: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        ends.setdefault(line.strip(), []).append(number)
    kept, at = [], 0
    while at < len(lines):
        opened = HEREDOC.search(lines[at])
        later = ends.get(opened[1], []) if opened else []
        after = bisect_right(later, at)
        kept.append(lines[at] if after == len(later) else lines[at][: opened.start()] if opened else "")
        at = at + 1 if after == len(later) else later[after] + 1
    return "\n".join(kept)


def _batch(text: str) -> dict[str, str]:
    """Nodes and GPUs requested in #SBATCH lines."""
    out = {}
    for name, value in SBATCH.findall(text):
        if name == "nodes":
            out["SLURM_NNODES"] = out["SLURM_JOB_NUM_NODES"] = value
        elif "gpu" in name + value:
            out["SLURM_GPUS_ON_NODE"] = value.split(":")[-1]
    return out


def _arguments(text: str, variables: Mapping[str, str]) -> Arguments:
    text = SUM.sub(lambda found: _expanded(found[0], variables), text)
    words = re.split(r"[\s()\"']+", re.sub(r"'(\([^']*\))'", lambda f: f[1].replace("(", "⟨").replace(")", "⟩"), text))
    out: Arguments = {}
    values: list[str] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, has, value = word.partition("=")
            values = [_value(value, variables)] if has else []
            out.setdefault(_named(name), []).append(values)
        elif word and re.match(r"[A-Za-z_]\w*\+?=", word):
            values = []  # the next variable: what follows is of no argument
        elif word:
            values.append(_value(word, variables))
    return out


def _value(word: str, variables: Mapping[str, str]) -> str:
    return _expanded(word, variables).replace("⟨", "(").replace("⟩", ")").strip("\"';")


def _named(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """With its variables in place; nothing for those that are not set."""
    for _ in range(8):  # variables within variables
        again = VARIABLE.sub(lambda f: variables.get(f[1] or f[3]) or f[2] or "", text)
        if again == text:
            break
        if len(again) > MOST:
            raise PresageError("has variables that hold each other and grow without end")
        text = again
    return SUM.sub(lambda f: str(_sum(f[1])), text)


def _sum(text: str) -> int | str:
    """Whole-number arithmetic; nothing for anything else."""
    try:
        total = _node(ast.parse(re.sub(r"\b0+(\d)", r"\1", text.strip()), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):  # the last is how deep brackets end
        return ""
    return total if abs(total) < MOST_NUMBER else ""


def _node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_node(node.left), _node(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_node(node.operand)
    raise ValueError("no arithmetic")


def number(text: str) -> float:
    """As Python and shells write them: 1_000, 1e6."""
    value = float(text.replace("_", "").replace(",", ""))
    if not abs(value) < MOST_NUMBER:
        raise ValueError(f"no number below {MOST_NUMBER:g}")
    return value


# ---- How Megatron writes down which layers are where: patterns of experts, layouts of a pipeline.

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


def _repeated(match: re.Match[str]) -> str:
    what, times = (match[1], match[2]) if match[2] else (match[3], match[4])
    return what * min(int(times), LAYERS)
