"""Reading files within limits, whatever is in them.

What others hand us is read through here, so that a file that is no file, one that is too large, or a small one that
unpacks into more than the memory ends in one sentence. Sizes are of what is inside, decompressed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from presage.errors import InputError, missing_file

DATA = Path(__file__).resolve().parent.parent / "data"  # the data files that ship with presage
MOST_TEXT = 64 << 20  # a file of settings, a script, a log
MOST_TOML = 8 << 20
MOST_PARTS = 64  # of a dotted key
MOST = 512 << 20  # a file that is read whole: a table, a graph, a pack
MOST_LINES = 5_000_000  # of a table: a row takes a hundred bytes and more in memory
MOST_STREAM = 16 << 30  # a file that is read in pieces: a trace
RATIO = 200  # times as large as the compressed file; the traces and graphs we have seen are 5 to 50 times
UNJUDGED = 32 << 20  # bytes before the ratio counts
PIECE = 8 << 20
TOML_TOKEN = re.compile(r"""(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[\w-]+|[ \t]+)|.""")
NO_FILE = "is a pipe or a device, not a file: save what it gives to a file first"
GZIP = b"\x1f\x8b"
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character that JSON writes as two


class ByteReader:
    """The bytes of a file in pieces, decompressed if gzip; raises InputError beyond the limits."""

    def __init__(self, path: Path, most: int = MOST_STREAM) -> None:
        self.path, self.most, self.taken = path, most, 0
        self._raw = _opened(path)
        magic = self._magic()
        if magic != GZIP and os.fstat(self._raw.fileno()).st_size > most:
            self._raw.close()
            raise _too_large(path, most)
        self._packed = gzip.GzipFile(fileobj=self._raw, mode="rb") if magic == GZIP else None
        self.empty = not magic

    def _magic(self) -> bytes:
        """The first two bytes; what cannot be read or has none to give yet (/proc/kmsg) is no file for us."""
        try:
            found = self._raw.read(2)
            self._raw.seek(0)
        except OSError as e:
            raise InputError(self.path, f"cannot be read: {e.strerror or e}") from e
        if found is None:
            raise InputError(self.path, NO_FILE)
        return found

    def read(self, size: int) -> bytes:
        """Up to this many bytes; empty at the end."""
        try:
            out = (self._packed or self._raw).read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            why = f"the gzip data is cut off or damaged ({e}); copy the file again"
            raise InputError(self.path, why) from e
        except OSError as e:
            raise InputError(self.path, f"cannot be read: {e.strerror or e}") from e
        self.taken += len(out)
        if self.taken > self.most:
            raise _too_large(self.path, self.most)
        if self._packed and self.taken > max(UNJUDGED, RATIO * self._raw.tell()):
            why = f"unpacks to more than {RATIO} times its size, as no real file does; if this one does, gunzip it"
            raise InputError(self.path, why)
        return out

    def rest(self) -> bytes:
        """All remaining bytes."""
        pieces = []
        while piece := self.read(PIECE):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __enter__(self) -> ByteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def open_bytes(path: str | Path, most: int = MOST_STREAM) -> ByteReader:
    """Open a non-empty file for reading in pieces."""
    stream = ByteReader(Path(path), most)
    if stream.empty:
        stream.__exit__()
        raise InputError(path, "the file is empty (0 bytes)")
    return stream


def read_bytes(path: str | Path, most: int = MOST) -> bytes:
    """The whole of a non-empty file, decompressed."""
    with open_bytes(path, most) as stream:
        return stream.rest()


def read_text(path: str | Path, most: int = MOST_TEXT) -> str:
    """The whole of a text file, which may be empty, in UTF-8, with a byte order mark or without.

    Line ends become newlines.
    """
    with ByteReader(Path(path), most) as stream:
        data = stream.rest()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise InputError(path, f"is not text in UTF-8 (byte {e.start})") from e


def lines(path: str | Path, most: int = MOST) -> Iterator[str]:
    """The lines of a UTF-8 table for `csv`, with their line ends."""
    with TextIOWrapper(BytesIO(read_bytes(path, most)), "utf-8-sig", newline="") as text:
        try:
            for number, line in enumerate(text):
                if number >= MOST_LINES:
                    raise InputError(path, f"has more than {MOST_LINES:,} lines: give a part of it")
                yield line
        except UnicodeDecodeError as e:
            raise InputError(path, "is not text in UTF-8, as a table is") from e


def read_json(path: str | Path, most: int = MOST_TEXT) -> Any:
    """The contents of a JSON file."""
    return parse_json(read_text(path, most), path)


def parse_json(text: str | bytes, path: str | Path) -> Any:
    """The contents of JSON text from a file."""
    try:
        value = json.loads(text)
        if HALF.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as e:
        raise InputError(path, "is nested too deeply") from e
    except UnicodeEncodeError as e:
        raise InputError(path, "has half of a character (a lone surrogate) in a text") from e
    except ValueError as e:  # a number of 5,000 digits too
        raise InputError(path, f"is not valid JSON: {_line(e)}") from e


def read_toml(path: str | Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    return parse_toml(read_text(path), path)


def shipped_toml(name: str) -> dict[str, Any]:
    """The contents of a TOML file that ships with presage, by its path in `DATA`."""
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def parse_toml(text: str, path: str | Path) -> dict[str, Any]:
    """The contents of TOML text from a file."""
    if len(text) > MOST_TOML:
        raise InputError(path, f"holds more than {MOST_TOML >> 20} MiB, the most that presage reads of TOML")
    if any(line.count(".") > MOST_PARTS and _parts(line) > MOST_PARTS for line in text.split("\n")):
        raise InputError(path, f"has a key of more than {MOST_PARTS} parts")  # which would take the parser gigabytes
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise InputError(path, "is nested too deeply") from e
    except ValueError as e:
        raise InputError(path, f"is not valid TOML: {_line(e)}") from e


def _parts(line: str) -> int:
    """Number of parts of the longest dotted key in the TOML text, counting numbers too."""
    most = now = 0
    for token in TOML_TOKEN.finditer(line):
        now = now + 1 if token[0] == "." else now if token[1] else 0
        most = max(most, now)
    return most


def _opened(path: Path) -> IO[bytes]:
    """Open a regular file. Pipes and devices may never end, and cannot be read twice."""
    try:
        kind = os.stat(path).st_mode  # before opening: to open a pipe is to wait for its writer
        if stat.S_ISDIR(kind):
            raise InputError(path, "is a folder, not a file")
        if not stat.S_ISREG(kind):
            raise InputError(path, NO_FILE)
        return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    except ValueError as e:  # a NUL in its name
        raise InputError(path, f"is not a valid file name: {e}") from e
    except FileNotFoundError as e:
        raise missing_file(path) from e
    except OSError as e:
        raise InputError(path, f"cannot be read: {e.strerror or e}") from e


def _too_large(path: Path, most: int) -> InputError:
    size = f"{most >> 30} GiB" if most >= 1 << 30 else f"{most >> 20} MiB"
    return InputError(path, f"holds more than {size}, the most that presage reads of such a file")


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:200]
