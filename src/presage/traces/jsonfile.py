"""Large JSON files in pieces: bytes from plain or gzip files, and the `traceEvents` array chunk by chunk.

A trace is one JSON object with one huge array in it. Its text is cut where one event ends and the next begins, and each
piece is decoded by itself, so that neither the whole text nor all decoded events are ever held at once. A cut is a
guess (`},{` may also stand inside an event); the decoder proves it: a piece cut in the wrong place does not decode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from presage.errors import InputError
from presage.files.reading import ByteReader, open_bytes

CHUNK = 8 << 20
MOST_BETWEEN = 128 << 20  # bytes without an event that ends, and before the first one
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")
EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')

T = TypeVar("T")
R = TypeVar("R")


def event_chunks(
    path: Path, decode: Callable[[bytes], list[T]], decode_object: Callable[[bytes], tuple[list[T], R]]
) -> Iterator[tuple[list[T], R | None]]:
    """Pieces of `traceEvents`, and with some of them what the object around the array says.

    `decode` turns the text of a JSON list into events; `decode_object` turns an object that holds `traceEvents` into
    the events and the rest of it. Both raise ValueError on bad JSON. A file that is a bare list is read the same way.
    """
    with open_bytes(path) as stream:
        text = bytearray()
        head = _head(path, stream, text)
        if head:
            yield _decoded(path, decode_object, head)
        wait = 0  # for so much text: each try looks at all of it
        while block := stream.read(CHUNK):
            text += block
            if len(text) >= wait:
                events, used = _whole_events(text, decode)
                del text[:used]
                wait = 0 if used else 2 * len(text)
                if events:
                    yield events, None
            if len(text) > MOST_BETWEEN:
                raise InputError(path, f"an event is larger than {MOST_BETWEEN >> 20} MiB, as none is", "traceEvents")
        if head:
            yield _decoded(path, decode_object, b'{"traceEvents":[' + bytes(text))
        else:
            yield _decoded(path, lambda t: (decode(t), None), b"[" + bytes(text))


def _decoded(path: Path, decode: Callable[[bytes], tuple[list[T], Any]], text: bytes) -> tuple[list[T], Any]:
    try:
        return decode(text)
    except RecursionError as e:
        raise InputError(path, "is nested too deeply to be a trace", "traceEvents") from e
    except ValueError as e:
        cut_off = "truncated" in str(e)
        why = "the JSON ends in the middle: the file is cut off" if cut_off else f"not a valid trace ({e})"
        raise InputError(path, why, "traceEvents") from e


def _head(path: Path, stream: ByteReader, text: bytearray) -> bytes:
    """Read up to the events; leave what follows in `text`; return the object before them with an empty array."""
    while len(text) <= MOST_BETWEEN and (block := stream.read(CHUNK)):
        text += block
        start = bytes(text[: 1 << 16]).lstrip()[:1]
        if start == b"[":
            del text[: text.index(b"[") + 1]
            return b""
        if start != b"{":
            break
        if found := EVENTS_KEY.search(text, max(0, len(text) - len(block) - 64)):
            head = bytes(text[: found.end()]) + b"]}"
            del text[: found.end()]
            return head
    if bytes(text[: 1 << 16]).lstrip()[:1] == b"{":
        what = "an execution graph, which holds no times" if b'"nodes"' in text else "not a Kineto (Chrome) trace"
        raise InputError(path, f"no such list in the file: it is {what}", "traceEvents")
    raise InputError(path, "not JSON: a trace starts with '{' or '['")


def _whole_events(text: bytearray, decode: Callable[[bytes], list[T]], tries: int = 8) -> tuple[list[T], int]:
    """Decode as many whole events as the text begins with; how many bytes they took, the comma included."""
    cuts = [m.span() for m in BETWEEN_EVENTS.finditer(text, max(0, len(text) - (1 << 16)))]
    for start, end in reversed(cuts[-(tries if len(text) <= 2 * CHUNK else 1) :]):
        try:
            return decode(b"[" + text[: start + 1] + b"]"), end
        except (ValueError, RecursionError):
            continue
    return [], 0  # no cut proved right: gather more text
