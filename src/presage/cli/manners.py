"""How a command behaves: how much it says, and whether it may draw on the terminal while it works.

Every command gets the same options through `mannered`; whoever prints asks `manners()`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, Any

import typer

from presage.files.finite import finite

__all__ = ["Manners", "Quiet", "behaving", "mannered", "manners"]

OUTPUT = "Output"
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="The answer alone: no tables, remarks or progress.", rich_help_panel=OUTPUT),
]


@dataclass(frozen=True)
class Manners:
    """What was asked for."""

    quiet: bool = False  # print the answer alone
    piped: bool = False  # stdout is JSON's

    @property
    def draws(self) -> bool:
        """Whether bars and spinners may be shown: on a terminal, to somebody who wants them."""
        return not self.quiet and not self.piped and sys.stderr.isatty()


AS_USUAL = Manners()
_NOW: ContextVar[Manners] = ContextVar("manners", default=AS_USUAL)


def manners() -> Manners:
    """Of the command that runs."""
    return _NOW.get()


@contextmanager
def behaving(quiet: bool, piped: bool = False) -> Iterator[None]:
    """Behave so, on top of what was asked before."""
    now = _NOW.get()
    token = _NOW.set(replace(now, quiet=quiet or now.quiet, piped=piped or now.piped))
    try:
        yield
    finally:
        _NOW.reset(token)


def _check_numbers(own: inspect.Signature, given: dict[str, Any]) -> None:
    """Numbers that are none, such as nan and 1e999, end here, whichever option they are of."""
    for name, value in given.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float):
                finite(number, _called(own.parameters[name]))


def _called(parameter: inspect.Parameter) -> str:
    """The option as people write it."""
    said = (n for m in getattr(parameter.annotation, "__metadata__", ()) for n in (m.default, *(m.param_decls or ())))
    return next((n for n in said if isinstance(n, str) and n.startswith("--")), f"--{parameter.name}")


def mannered(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with the options that all commands have."""
    own = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)

    @wraps(command)
    def run(*args: Any, quiet: bool = False, **given: Any) -> None:
        _check_numbers(own, given)
        with behaving(quiet, given.get("json") == "-"):
            command(*args, **given)

    run.__signature__ = own.replace(parameters=[*own.parameters.values(), extra])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in own.parameters.values()} | {"quiet": Quiet, "return": None}
    return run
