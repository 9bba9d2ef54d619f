"""Python objects that ranks send to one another, such as the shapes that stages of a pipeline exchange at first.

A rank that receives one waits for a run of the rank that sends it, up to where it does: ranks are captured one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import PresageError


class _Awaited(BaseException):
    """A rank receives what another has not sent yet."""

    def __init__(self, sender: int, receiver: int, number: int) -> None:
        from presage.capture.backend import users_line  # torch is loaded where ranks are captured, not before

        super().__init__()
        self.message, self.line = (sender, receiver, number), users_line()


class _Delivered(BaseException):
    """A rank that ran for the sake of a message has sent it."""


@dataclass
class SentObjects:
    """What ranks have sent, by sender and receiver."""

    sent: defaultdict[tuple[int, int], list[list[Any]]] = field(default_factory=lambda: defaultdict(list))
    read: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    like: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)  # by group, places in it, and number
    wanted: tuple[int, int, int] | None = None

    def restart(self, rank: int, wanted: tuple[int, int, int] | None) -> None:
        """A rank runs from its beginning, for itself or for the sake of a message."""
        self.wanted = wanted
        for pair in [p for p in self.sent if p[0] == rank]:
            del self.sent[pair]
        for pair in [p for p in self.read if p[1] == rank]:
            del self.read[pair]

    def send(self, sender: int, receiver: int, objects: Sequence[Any], places: tuple[Any, ...]) -> None:
        self.sent[sender, receiver].append(list(objects))
        self.like[(*places, len(self.sent[sender, receiver]))] = list(objects)
        if self.wanted == (sender, receiver, len(self.sent[sender, receiver])):
            raise _Delivered

    def receive(self, sender: int, receiver: int, places: tuple[Any, ...]) -> list[Any]:
        """What was sent to this rank, or to one that has its place in another group of the same kind."""
        number = self.read[sender, receiver] + 1
        known = len(self.sent[sender, receiver]) >= number
        if not known and (*places, number) not in self.like:
            raise _Awaited(sender, receiver, number)
        self.read[sender, receiver] = number
        return self.sent[sender, receiver][number - 1] if known else self.like[(*places, number)]


_shared: ContextVar[SentObjects | None] = ContextVar("objects that ranks have sent", default=None)


def sent_objects() -> SentObjects:
    """Those of the ranks that are captured now."""
    return _shared.get() or SentObjects()


@contextmanager
def sharing_objects() -> Iterator[SentObjects]:
    """Captures inside are of ranks of the same job: each receives what the others have sent."""
    current = _shared.get()
    token = _shared.set(current or SentObjects())
    try:
        yield sent_objects()
    finally:
        _shared.reset(token)


P = ParamSpec("P")
R = TypeVar("R")


def with_senders(capture: Callable[P, R]) -> Callable[P, R]:
    """A capture that runs other ranks too, where its rank receives objects from them."""

    @wraps(capture)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        variant: Any = kwargs.get("variant", AS_WRITTEN)
        with sharing_objects() as objects:
            out = _captured(lambda v: capture(*args, **{**kwargs, "variant": v}), variant, objects, ())  # type: ignore[arg-type]
        assert out is not None
        return out

    return run


def _captured(
    capture: Callable[[Variant], R], variant: Variant, objects: SentObjects, chain: tuple[tuple[int, int, int], ...]
) -> R | None:
    """A rank's capture; None where it was run for the last message of a chain, and has sent it."""
    while True:
        objects.restart(variant.rank, chain[-1] if chain else None)
        try:
            out = capture(variant)
        except _Delivered:
            return None
        except _Awaited as e:
            sender, receiver, _ = e.message
            if e.message in chain or sender == receiver:
                raise PresageError(
                    f"{e.line}: deadlock: rank {receiver} waits for an object of rank {sender}, which waits for one of "
                    f"rank {receiver} first: give each rank its own rank and stage (from RANK, or dist.get_rank())"
                ) from None
            _captured(capture, replace(variant, rank=sender), objects, (*chain, e.message))
            continue
        if chain:
            sender, receiver, number = chain[-1]
            if before := objects.sent[sender, receiver]:  # it ran fewer steps than its receiver
                before.append(before[-1])
                return None
            raise PresageError(
                f"deadlock: rank {receiver} waits for object {number} of rank {sender}, which sends none"
            )
        return out
