"""Large JSON files in pieces: bytes from plain or gzip files, and the `traceEvents` array chunk by chunk.

A trace is one JSON object with one huge array in it. Its text is cut where one event ends and the next begins, and each
piece is decoded by itself, so that neither the whole text nor all decoded events are ever held at once. A cut is a
guess (`},{` may also stand inside an event); the decoder proves it: a piece cut in the wrong place does not decode.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from presage.errors import InputError

__all__ = ["event_chunks", "open_bytes", "read_bytes"]

CHUNK = 8 << 20
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")
EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')

T = TypeVar("T")
R = TypeVar("R")


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if it is gzip, whatever its name says."""
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
        if not magic:
            raise InputError(path, "the file is empty (0 bytes)")
        return gzip.open(path, "rb") if magic == b"\x1f\x8b" else path.open("rb")  # type: ignore[return-value]
    except OSError as e:
        raise InputError(path, f"cannot be read: {e.strerror or e}") from e


def read_some(path: Path, stream: IO[bytes], size: int) -> bytes:
    try:
        return stream.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as e:
        raise InputError(path, f"the gzip data is cut off or damaged ({e}); copy the file again") from e


def read_bytes(path: Path) -> bytes:
    """The whole file, decompressed."""
    with open_bytes(path) as stream:
        return read_some(path, stream, -1)


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
        while block := read_some(path, stream, CHUNK):
            text += block
            events, used = _whole_events(text, decode)
            del text[:used]
            if events:
                yield events, None
        if head:
            yield _decoded(path, decode_object, b'{"traceEvents":[' + bytes(text))
        else:
            yield _decoded(path, lambda t: (decode(t), None), b"[" + bytes(text))


def _decoded(path: Path, decode: Callable[[bytes], tuple[list[T], Any]], text: bytes) -> tuple[list[T], Any]:
    try:
        return decode(text)
    except ValueError as e:
        cut_off = "truncated" in str(e)
        why = "the JSON ends in the middle: the file is cut off" if cut_off else f"not a valid trace ({e})"
        raise InputError(path, why, "traceEvents") from e


def _head(path: Path, stream: IO[bytes], text: bytearray) -> bytes:
    """Read up to the events; leave what follows in `text`; return the object before them with an empty array."""
    while block := read_some(path, stream, CHUNK):
        text += block
        start = text.lstrip()[:1]
        if start == b"[":
            del text[: text.index(b"[") + 1]
            return b""
        if start != b"{":
            break
        if found := EVENTS_KEY.search(text):
            head = bytes(text[: found.end()]) + b"]}"
            del text[: found.end()]
            return head
    if bytes(text).lstrip()[:1] == b"{":
        what = "an execution graph, which holds no times" if b'"nodes"' in text else "not a Kineto (Chrome) trace"
        raise InputError(path, f"no such list in the file: it is {what}", "traceEvents")
    raise InputError(path, "not JSON: a trace starts with '{' or '['")


def _whole_events(text: bytearray, decode: Callable[[bytes], list[T]], tries: int = 8) -> tuple[list[T], int]:
    """Decode as many whole events as the text begins with; how many bytes they took, the comma included."""
    cuts = [m.span() for m in BETWEEN_EVENTS.finditer(text, max(0, len(text) - (1 << 16)))]
    for start, end in reversed(cuts[-tries:]):
        try:
            return decode(b"[" + text[: start + 1] + b"]"), end
        except ValueError:
            continue
    return [], 0  # no cut proved right: gather more text
