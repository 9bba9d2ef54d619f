"""Typed values from JSON files, with one-sentence errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from presage.errors import InputError
from presage.files.reading import MOST, read_bytes

T = TypeVar("T")
# msgspec works out a record's fields when it first converts to it; two threads that do so at once crash it.
_ONE_AT_A_TIME = threading.RLock()


def convert_record(value: Any, kind: type[T]) -> T:
    """Plain values as a value of the given type; safe where several threads answer."""
    with _ONE_AT_A_TIME:
        return msgspec.convert(value, kind)


def read_checked(path: str | Path, kind: type[T], most: int = MOST) -> T:
    """The contents of a JSON file, plain or gzip, as a value of the given type."""
    value: T = decode_json(path, read_bytes(path, most), kind)
    return value


def decode_json(path: str | Path, data: bytes | msgspec.Raw, kind: Any, field: str = "") -> Any:
    """JSON of a file as a value of the given type; `field` is its place in the file, for errors."""
    try:
        with _ONE_AT_A_TIME:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, RecursionError) as e:
        raise describe_validation_error(path, e, field) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InputError(path, f"not valid JSON: {e}", field or None) from e


def describe_validation_error(path: str | Path, e: Exception, field: str = "") -> InputError:
    """The message of a failed check."""
    if isinstance(e, RecursionError):
        return InputError(path, "is nested too deeply", field or None)
    return InputError(path, str(e), field or None)
