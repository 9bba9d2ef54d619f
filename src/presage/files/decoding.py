"""Checked values from the JSON of files, or one sentence that says what is wrong where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from presage.errors import InputError
from presage.files.reading import MOST, read_bytes

T = TypeVar("T")


def read_checked(path: str | Path, kind: type[T], most: int = MOST) -> T:
    """What a JSON file, plain or gzip, holds, as a value of that kind."""
    found: T = decoded(path, read_bytes(path, most), kind)
    return found


def decoded(path: str | Path, data: bytes | msgspec.Raw, kind: Any, field: str = "") -> Any:
    """JSON of a file as a value of that kind; `field` is where it stands in the file."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, RecursionError) as e:
        raise wrong(path, e, field) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InputError(path, f"not valid JSON: {e}", field or None) from e


def wrong(path: str | Path, e: Exception, field: str = "") -> InputError:
    """What a failed check says."""
    if isinstance(e, RecursionError):
        return InputError(path, "is nested too deeply", field or None)
    return InputError(path, str(e), field or None)
