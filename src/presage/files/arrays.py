"""Arrays in files (.npy, .npz) as plain numbers: never pickles, never more than the file really holds.

NumPy's own reader believes a header that claims more than there is, and unpacks whatever a zip holds.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.errors import InputError
from presage.files.reading import MOST, RATIO, UNJUDGED, read_bytes

Array = npt.NDArray[Any]
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
BAD_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, OSError)
BAD_HEADER = (ValueError, TokenError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError)


def read_npz(path: str | Path, most: int = MOST) -> dict[str, Array]:
    """The arrays of a .npz file by name."""
    return parse_npz(read_bytes(path, most), path, most)


def parse_npz(data: bytes, path: str | Path, most: int = MOST) -> dict[str, Array]:
    """The arrays of a .npz file's bytes."""
    check_zip(data, path, most)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            parts = {i.filename.removesuffix(".npy"): held.read(i) for i in held.infolist()}
    except (*BAD_ZIP, ValueError, UnicodeDecodeError) as e:
        raise InputError(path, f"is not an .npz file, or is damaged: {e}") from e
    return {name: parse_npy(part, path, name) for name, part in parts.items()}


def check_zip(data: bytes, path: str | Path, most: int = MOST) -> None:
    """Check that the unpacked size of a zip is bounded; `zipfile` never reads more than an entry declares."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            total = sum(i.file_size for i in held.infolist())
    except (*BAD_ZIP, ValueError, UnicodeDecodeError) as e:
        raise InputError(path, f"is not a zip file, or is damaged: {e}") from e
    if total > most or total > max(UNJUDGED, RATIO * len(data)):
        raise InputError(path, f"unpacks to {total / 2**30:.3g} GiB from {len(data) / 2**20:.3g} MiB: not read")


def parse_npy(data: bytes, path: str | Path, name: str | None = None) -> Array:
    """The array of a .npy file's bytes; `name` is the part of the file, for errors."""
    stream = io.BytesIO(data)
    try:
        read = HEADERS.get(np.lib.format.read_magic(stream))
        if read is None:
            raise InputError(path, "is of a version of NumPy's format that plain numbers do not need", name)
        shape, by_columns, kind = read(stream)
    except BAD_HEADER as e:
        raise InputError(path, "is not a NumPy array", name) from e
    if kind.hasobject:
        raise InputError(path, "holds Python objects, which are never read: save plain numbers", name)
    here = len(data) - stream.tell()
    if any(n < 0 for n in shape) or prod(shape) * kind.itemsize != here:
        raise InputError(path, f"is declared as {'x'.join(map(str, shape))} of {kind} but holds {here} bytes", name)
    if not kind.itemsize:
        raise InputError(path, f"holds {kind}, not numbers", name)
    flat = np.frombuffer(data, kind, offset=stream.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")
