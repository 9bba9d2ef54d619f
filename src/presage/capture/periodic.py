"""Work that an optimizer does once in several steps, such as new preconditioners in every tenth.

Steps are looked for that are alike, and such a step is rare: it would be missed. So comparisons of the script's own,
`step % 10 == 0`, are watched while an optimizer steps, and made true for a step: it is recorded, and what only it runs
counts a tenth of its time, so that the step predicted is the mean one.
"""

from __future__ import annotations

import ast
import builtins
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from presage.capture.calls import RecordedCall

NAME = "__presage_due__"
RAREST = 500  # steps; of what is rarer, little is to be seen in the mean


class _Watched(ast.NodeTransformer):
    """`a % b == c` and `not a % b` call a function of this name, with the line."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq) and _is_remainder(node.left):
            return _due_call(node, node.left, node.comparators[0])
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and _is_remainder(node.operand):
            return _due_call(node, node.operand, ast.Constant(0))
        return node


def _is_remainder(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant)


def _due_call(node: Any, remainder: Any, rest: ast.expr) -> ast.AST:
    given = [remainder.left, remainder.right, rest, ast.Constant(node.lineno)]
    call = ast.Call(ast.Name(NAME, ast.Load()), given, [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


class Periods:
    """Which lines of a script an optimizer's step passes that are due once in several steps."""

    def __init__(self, in_optimizer: Callable[[], bool], on: bool = True) -> None:
        self.in_optimizer, self.on = in_optimizer, on
        self.due: bool | None = None  # whether they are made due, or made not to be
        self.found: dict[int, int] = {}  # steps from one time to the next, by line

    @property
    def steps(self) -> int:
        """Steps from one time to the next of what is due most often; 0 where nothing is."""
        return min((n for n in self.found.values() if n <= RAREST), default=0) if self.on else 0

    @property
    def lines(self) -> list[int]:
        return sorted(line for line, n in self.found.items() if n == self.steps)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A script that is run inside is watched."""
        if not self.on:
            yield
            return
        setattr(builtins, NAME, self._is_due)
        vars(runpy)["compile"] = _compiled  # in place of the builtin
        try:
            yield
        finally:
            delattr(builtins, NAME)
            del vars(runpy)["compile"]

    def _is_due(self, number: Any, steps: Any, rest: Any, line: int) -> Any:
        out = number % steps == rest
        if self.due is not None and self.found.get(line) == self.steps:
            return self.due
        if type(number) is int and type(steps) is int and steps > 1 and not out and self.in_optimizer():
            self.found.setdefault(line, steps)
        return out


def _compiled(source: Any, path: str, mode: str) -> Any:
    """The code of a script whose remainders are watched."""
    return compile(_Watched().visit(ast.parse(source, path)), path, mode)


Key = tuple[str, str, str, str]


def keys_of(calls: Sequence[RecordedCall]) -> list[Key]:
    """What calls of two steps are told apart by."""
    return [(c.name, c.line, c.phase, c.module) for c in calls]


def extra_calls(calls: Sequence[RecordedCall], usual: Sequence[Key]) -> list[int]:
    """Places of the calls that the usual step does not have; none where the usual step is no part of this one."""
    extra, place = [], 0
    for i, key in enumerate(keys_of(calls)):
        if place < len(usual) and key == usual[place]:
            place += 1
        else:
            extra.append(i)
    return extra if place == len(usual) else []


def splits_compiled(calls: Sequence[RecordedCall], extra: Sequence[int]) -> bool:
    """Whether a call of these is plain code amid what is compiled, which is then compiled in pieces."""
    own = set(extra)
    kept = [c.compiled for i, c in enumerate(calls) if i not in own]
    return any(kept[i - n - 1 : i - n + 1] == [kept[i - n - 1]] * 2 != [""] * 2 for n, i in enumerate(extra) if i > n)
