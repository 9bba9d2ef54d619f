"""Graphs in files: a line that says what it is and which version, then MessagePack, compressed."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

import msgspec

from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.files.reading import ByteReader
from presage.graph.graph import Graph, faults

SUFFIX = ".presage"
VERSION = 1
_MAGIC = b"presage graph "
_FIRST_LINE = re.compile(rb"presage graph (\d{1,6})\n")
MOST = 128 << 20  # of the text inside: a file of a few bytes must not be able to fill the memory


def write(graph: Graph, path: str | Path) -> None:
    """Save a graph; the file appears whole or not at all."""
    write_whole(path, to_bytes(graph))


def to_bytes(graph: Graph) -> bytes:
    """The same graph always gives the same bytes."""
    return _MAGIC + b"%d\n" % VERSION + gzip.compress(_ENCODER.encode(graph), 6, mtime=0)


def _as_text(value: object) -> str:
    """Some libraries' texts are a kind of str of their own (torch.__version__); anything else does not belong here."""
    if isinstance(value, str):
        return str.__str__(value)
    raise PresageError(f"a graph that holds a {type(value).__name__} ({value!r}) cannot be saved")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_text)


def is_saved(path: str | Path) -> bool:
    """Whether a file says it is a saved graph."""
    try:
        with open(path, "rb") as f:
            return f.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read(path: str | Path) -> Graph:
    """A saved graph, checked."""
    with ByteReader(Path(path), MOST) as stream:
        return from_bytes(stream.rest(), path)


def from_bytes(data: bytes, path: str | Path = "graph") -> Graph:
    """A graph from the bytes of its file; `path` is what errors call it."""
    first = _FIRST_LINE.match(data)
    if not first:
        raise InputError(path, "is not a saved graph (presage graph FILE.py:FUNCTION --out writes one)")
    if int(first[1]) > VERSION:
        raise InputError(path, f"is {int(first[1])}, newer than this presage reads ({VERSION}): update it", "version")
    if int(first[1]) < 1:
        raise InputError(path, "is 0; versions start at 1", "version")
    graph = _decoded(_unpacked(data[first.end() :], path), path)
    for field, problem in faults(graph):
        raise InputError(path, problem, field)
    return graph


def _unpacked(data: bytes, path: str | Path) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    try:
        out = reader.decompress(data, MOST)
    except zlib.error as e:
        raise InputError(path, "is damaged: it cannot be decompressed") from e
    if reader.unconsumed_tail:
        raise InputError(path, f"holds more than {MOST >> 20} MiB, as no step does")
    if not reader.eof:
        raise InputError(path, "is cut short")
    return out


def _decoded(data: bytes, path: str | Path) -> Graph:
    try:
        return msgspec.msgpack.decode(data, type=Graph)
    except msgspec.ValidationError as e:
        problem, _, at = str(e).partition(" - at `$")
        raise InputError(path, problem[:1].lower() + problem[1:], at.rstrip("`").lstrip(".") or None) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InputError(path, f"is damaged: {e}") from e
