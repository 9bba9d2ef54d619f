"""Conditions over an answer's JSON, for --fail-if: `not fits`, `p95 > 40ms and peak_memory_bytes < 70GiB`.

Names are keys of the JSON, dotted where needed (`step_ms.p95`, `memory.margin_bytes`); a bare key is looked up at the
outermost level that has it. A key that is no plain word is quoted: `modules."blocks.0".ms`, `"a.b" > 3`. Numbers may
carry a unit; one without a unit is in the unit of the key it is compared with.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from presage.errors import PresageError, near

UNITS: dict[str, tuple[str, float]] = {
    "us": ("s", 1e-6), "ms": ("s", 1e-3), "s": ("s", 1.0), "min": ("s", 60.0), "h": ("s", 3600.0),
    "hour": ("s", 3600.0), "hours": ("s", 3600.0), "d": ("s", 86400.0), "day": ("s", 86400.0), "days": ("s", 86400.0),
    "B": ("B", 1.0), "kB": ("B", 1e3), "MB": ("B", 1e6), "GB": ("B", 1e9), "TB": ("B", 1e12),
    "KiB": ("B", 2.0**10), "MiB": ("B", 2.0**20), "GiB": ("B", 2.0**30), "TiB": ("B", 2.0**40), "%": ("1", 0.01),
}  # fmt: skip
KEYS = {"_ms": "ms", "_us": "us", "_s": "s", "_bytes": "B", "days": "days", "hours": "h"}  # endings of keys
QUOTED = r"""(?:"[^"]*"|'[^']*')"""
KEY = rf"(?:{QUOTED}|[A-Za-z_]\w*)"
TOKEN = re.compile(
    rf"(?P<path>{QUOTED}(?:\.{KEY})+|(?:[A-Za-z_]\w*\.)+{QUOTED}(?:\.{KEY})*)|{QUOTED}|"
    r"(?<![\w.])(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
    r"\s*(?P<unit>us|ms|min|hours?|days?|[smhd]|[kMGT]B|[KMGT]iB|B|%)(?!\w)"
)  # quoted keys joined by dots, other quoted text, and numbers with a unit
SHORT = ("step_ms", "days")  # blocks whose quantiles may be named alone: p95
COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
COMPUTE: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
EXAMPLE = "e.g. --fail-if 'not fits' or --fail-if 'p95 > 40ms'"
QUOTES = "\"'"
LONGEST = 2000  # characters


@dataclass(frozen=True)
class Quantity:
    """A value with what it is measured in; `scale` is the JSON's unit, for numbers without one."""

    value: Any
    unit: str = ""
    scale: float = 1.0


def parse_condition(condition: str) -> ast.expr:
    """The condition as a syntax tree; raises for what is no condition, whatever the answer."""
    if len(condition) > LONGEST:
        raise _error(condition, f"longer than {LONGEST} characters")
    text = TOKEN.sub(_python, condition)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise _error(condition, f"cannot be read; {EXAMPLE}") from e
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not hasattr(_Evaluator, f"visit_{type(node).__name__}"):
            what = "only names, numbers, comparisons, and/or/not and + - * / are known"
            raise _error(condition, f"{what}; {EXAMPLE}")
    return tree


def holds(condition: str, data: Mapping[str, Any]) -> bool:
    """Whether the condition holds for an answer's JSON."""
    found = _Evaluator(condition, data).visit(parse_condition(condition))
    if not isinstance(found.value, bool):
        raise _error(condition, f"is a value, not a condition: compare it with something, {EXAMPLE}")
    return found.value


def _python(token: re.Match[str]) -> str:
    """What Python cannot read, as a call that it can."""
    if token["path"]:
        return f"_key({', '.join(repr(key.strip(QUOTES)) for key in re.findall(KEY, token['path']))})"
    return f"_unit({token['number']}, {token['unit']!r})" if token["unit"] else token[0]


def _error(condition: str, why: str) -> PresageError:
    return PresageError(f"--fail-if {condition!r}: {why}")


class _Evaluator:
    """Evaluates the few kinds of expression that conditions have; everything else is refused."""

    def __init__(self, condition: str, data: Mapping[str, Any]) -> None:
        self.condition, self.data = condition, data

    def visit(self, node: ast.expr) -> Quantity:
        return getattr(self, f"visit_{type(node).__name__}")(node)  # type: ignore[no-any-return]

    def visit_Constant(self, node: ast.Constant) -> Quantity:
        """A number or a text; a text that is no plain word is a key where the JSON has such a one."""
        name = node.value
        if isinstance(name, str) and not name.isidentifier() and _holds_key(self.data, name):
            return self._lookup([name])
        return Quantity(name)

    def visit_Call(self, node: ast.Call) -> Quantity:
        given = [a.value for a in node.args if isinstance(a, ast.Constant)]
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "_key":
            return self._lookup([str(key) for key in given])
        if called != "_unit" or len(given) != 2:
            raise _error(self.condition, "functions are not known")
        unit, scale = UNITS[str(given[1])]
        return Quantity(float(given[0]) * scale, unit)  # type: ignore[arg-type]

    def visit_Name(self, node: ast.Name) -> Quantity:
        if node.id in ("true", "false"):
            return Quantity(node.id == "true")
        return self._lookup([node.id])

    def visit_Attribute(self, node: ast.Attribute) -> Quantity:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            raise _error(self.condition, "a dot joins names of the JSON, as in step_ms.p95")
        return self._lookup([inner.id, *reversed(parts)])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Quantity:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return Quantity(not self._truth(value))
        return Quantity(-self._number(value), value.unit, value.scale)

    def visit_BoolOp(self, node: ast.BoolOp) -> Quantity:
        values = [self._truth(self.visit(v)) for v in node.values]
        return Quantity(all(values) if isinstance(node.op, ast.And) else any(values))

    def visit_BinOp(self, node: ast.BinOp) -> Quantity:
        left, right = self.visit(node.left), self.visit(node.right)
        compute = COMPUTE.get(type(node.op))
        if compute is None:
            raise _error(self.condition, "of operators, + - * / are known")
        try:
            value = compute(self._number(left), self._number(right))
        except ZeroDivisionError as e:
            raise _error(self.condition, "divides by zero") from e
        joined = left if left.unit else right
        ratio = isinstance(node.op, ast.Div) and left.unit == right.unit
        return Quantity(value, "" if ratio else joined.unit, 1.0 if ratio else joined.scale)

    def visit_Compare(self, node: ast.Compare) -> Quantity:
        values = [self.visit(v) for v in (node.left, *node.comparators)]
        checks = zip(node.ops, values[:-1], values[1:], strict=True)
        return Quantity(all(self._compare(op, a, b) for op, a, b in checks))

    def _compare(self, op: ast.cmpop, a: Quantity, b: Quantity) -> bool:
        compare = COMPARE.get(type(op))
        if compare is None:
            raise _error(self.condition, "of comparisons, < <= > >= == != are known")
        if isinstance(a.value, str) or isinstance(b.value, str):
            return compare(str(a.value), str(b.value))
        if a.unit and b.unit and a.unit != b.unit:
            raise _error(self.condition, "compares a time with a size")
        left = self._number(a) * (b.scale if b.unit and not a.unit else 1.0)
        right = self._number(b) * (a.scale if a.unit and not b.unit else 1.0)
        return compare(left, right)

    def _number(self, q: Quantity) -> float:
        if isinstance(q.value, bool) or not isinstance(q.value, int | float):
            raise _error(self.condition, f"{q.value!r} is not a number")
        return q.value

    def _truth(self, q: Quantity) -> bool:
        if not isinstance(q.value, bool):
            raise _error(self.condition, f"{q.value!r} is neither true nor false")
        return q.value

    # ---- names

    def _lookup(self, parts: list[str]) -> Quantity:
        path, name = self._path(parts), dotted(parts)
        value: Any = self.data
        for key in path:
            value = value[key]
        if value is None or isinstance(value, dict | list):
            kind = (
                "unknown (null) here"
                if value is None
                else f"not a single value; name one of {', '.join(_keys(value)[:8])}"
            )
            raise _error(self.condition, f"{name} is {kind}")
        unit = next((u for key in reversed(path) for end, u in KEYS.items() if key == end or key.endswith(end)), "")
        if isinstance(value, bool | str) or not unit:
            return Quantity(value)
        base, scale = UNITS[unit]
        return Quantity(value * scale, base, scale)

    def _path(self, parts: list[str]) -> tuple[str, ...]:
        """Where a name stands: from the top, in a block that may be left out, or at the outermost level that has it."""
        level: list[tuple[tuple[str, ...], Any]] = [((), self.data), *(((b,), self.data.get(b)) for b in SHORT)]
        while level:
            hits = [(*where, *parts) for where, value in level if _has(value, parts)]
            if len(hits) > 1 and len({len(h) for h in hits}) == 1 and hits[0][:1] not in [(b,) for b in SHORT]:
                names = ", ".join(dotted(h) for h in hits[:5])
                raise _error(self.condition, f"{dotted(parts)} stands in several places: say {names}")
            if hits:
                return hits[0]
            level = [((*where, k), v) for where, value in level if isinstance(value, dict) for k, v in value.items()]
        known = sorted({*_keys(self.data), *(k for b in SHORT for k in _keys(self.data.get(b)))})
        raise _error(self.condition, f"no {dotted(parts)} in this answer's JSON{near(parts[-1], known)}")


def _has(value: Any, parts: list[str]) -> bool:
    for key in parts:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _holds_key(value: Any, name: str) -> bool:
    return isinstance(value, dict) and (name in value or any(_holds_key(v, name) for v in value.values()))


def dotted(keys: Sequence[str]) -> str:
    """The name of a key as a condition writes it."""
    return ".".join(key if key.isidentifier() else f'"{key}"' for key in keys)


def _keys(value: Any) -> list[str]:
    return [str(k) for k in value] if isinstance(value, dict) else []
