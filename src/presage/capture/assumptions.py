"""Numbers that code reads and a capture does not have: what each is taken to be, where, and which ops hang on it.

A number of Python that was read from such a tensor remembers it (`AssumedFloat`, `AssumedInt`), so that one that is
compared counts as a decision, and one that is only logged does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from presage.errors import PresageError
from presage.graph.graph import Assumption


@dataclass(eq=False)
class Reading:
    """One line that read something unknown; the last value counts."""

    line: str
    what: str
    value: str = ""
    decides: bool = False
    builds: bool = False  # it was read while the model was built: all of the step can hang on it
    calls: set[int] = field(default_factory=set)  # recorded calls that ran after it in the same function
    later: set[int] = field(default_factory=set)  # the same for the function that called it

    def assumption(self, steady: bool, given: bool) -> Assumption:
        return Assumption(self.line, self.what, self.value, self.decides or not steady, given)


class Assumptions:
    """All readings of a capture, with the values the user gave for some (`--assume FILE:LINE=VALUE`)."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self.given = dict(given or {})
        self.used: set[str] = set()
        self.readings: dict[tuple[str, str], Reading] = {}
        self.last: Reading | None = None
        self.recorded = False  # the step is recorded: values of a further run do not count
        self._open: list[tuple[Reading, int, int]] = []  # with the frames it was read in

    def read(self, line: str, what: str, value: Any) -> Any:
        """The value to go on with, for what was read at a line."""
        reading = self.readings.setdefault((line, what), Reading(line, what))
        if line in self.given:
            self.used.add(line)
            value = _as_given(self.given[line], value, line)
        if not (self.recorded and reading.value):
            reading.value = f"{value:.4g}" if isinstance(value, float) else str(value)
        reading.decides |= isinstance(value, bool) or what.startswith("the size")
        self.last = reading
        return value

    def remembering(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`Tensor.item`, with numbers that remember that they are assumed."""

        def item(tensor: Any) -> Any:
            self.last = None
            value = read(tensor)
            if self.last is None or type(value) not in (float, int):
                return value
            return (AssumedFloat if type(value) is float else AssumedInt)(value).of(self.last)

        return item

    @property
    def undecided(self) -> bool:
        """Whether something was read of which only another run can tell whether anything depends on it."""
        return any(not r.decides for r in self.readings.values())

    def follow(self, frames: tuple[int, int]) -> None:
        """From now on, ops that run in these frames hang on the last reading."""
        if self.last is not None and not any(o == (self.last, *frames) for o in self._open):
            self._open.append((self.last, *frames))

    def ran(self, call: int) -> None:
        """A call was recorded: it hangs on every reading whose function is still running."""
        if not self._open:
            return
        alive = set()
        frame: Any = sys._getframe(1)
        while frame is not None:
            alive.add(id(frame))
            frame = frame.f_back
        self._open = [o for o in self._open if o[1] in alive or o[2] in alive]
        for reading, inner, outer in self._open:
            if inner in alive:
                reading.calls.add(call)
            if outer in alive:
                reading.later.add(call)

    def built(self) -> None:
        """The model is built, and the steps begin."""
        for reading in self.readings.values():
            reading.builds = True

    def begin(self) -> None:
        """The recorded step begins: calls of earlier steps are not its."""
        self._open.clear()
        for reading in self.readings.values():
            reading.calls.clear()
            reading.later.clear()

    def found(self, steady: bool, count: int) -> tuple[tuple[Assumption, ...], dict[int, tuple[int, ...]]]:
        """All assumptions, and the numbers of those that each of so many recorded calls hangs on."""
        unused = sorted(set(self.given) - self.used)
        if unused:
            lines = ", ".join(sorted({r.line for r in self.readings.values()})) or "none"
            raise PresageError(f"--assume {unused[0]}: no unknown value is read there; lines that read one: {lines}")
        calls: dict[int, tuple[int, ...]] = {}
        out = tuple(r.assumption(steady, r.line in self.given) for r in self.readings.values())
        for number, reading in enumerate(self.readings.values()):
            if out[number].decides:
                for call in range(count) if reading.builds else reading.calls or reading.later:
                    calls[call] = (*calls.get(call, ()), number)
        return out, calls


def _as_given(text: str, value: Any, line: str) -> Any:
    words = {"true": True, "false": False}
    try:
        if isinstance(value, bool):
            return words[text.lower()]
        return type(value)(float(text)) if isinstance(value, int | float) else value
    except (KeyError, ValueError) as e:
        kind = "true or false" if isinstance(value, bool) else "a number"
        raise PresageError(f"--assume {line}={text}: {kind} is read there") from e


class _Assumed:
    """A number that remembers where it was read."""

    reading: Reading

    def of(self, reading: Reading) -> Any:
        self.reading = reading
        return self

    def __reduce__(self) -> Any:
        plain: Any = float if isinstance(self, float) else int
        return plain, (plain.__pos__(self),)


class AssumedFloat(_Assumed, float):
    """A float read from a tensor whose numbers are not known."""


class AssumedInt(_Assumed, int):
    """A whole number read from a tensor whose numbers are not known."""


def _deciding(plain: type, name: str) -> Callable[..., Any]:
    method = getattr(plain, name)

    def run(self: Any, *args: Any) -> Any:
        self.reading.decides = True
        return method(self, *args)

    return run


def _carried(plain: type, name: str) -> Callable[..., Any]:
    method = getattr(plain, name)

    def run(self: Any, *args: Any) -> Any:
        out = method(self, *args)
        if type(out) is float:
            return AssumedFloat(out).of(self.reading)
        return AssumedInt(out).of(self.reading) if type(out) is int else out

    return run


_DECIDING = (
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__eq__",
    "__ne__",
    "__bool__",
    "__int__",
    "__trunc__",
    "__floor__",
    "__ceil__",
)
_CARRIED = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "neg", "abs", "pow", "mod")
for _kind, _plain in ((AssumedFloat, float), (AssumedInt, int)):
    for _name in _DECIDING:
        setattr(_kind, _name, _deciding(_plain, _name))
    for _name in _CARRIED:
        setattr(_kind, f"__{_name}__", _carried(_plain, f"__{_name}__"))
    _kind.__hash__ = _plain.__hash__  # type: ignore[method-assign]
