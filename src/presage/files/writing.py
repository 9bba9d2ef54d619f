"""Writing files atomically."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
from glob import escape
from pathlib import Path

from presage.errors import PresageError

PART = ".part"  # how the names of neighbours end


def write_whole(path: str | Path, data: bytes, level: int = 6) -> None:
    """Write to a neighbour, then rename: whoever is killed, at any moment, leaves the old file or the new one, whole.

    Names ending in .gz are compressed. A link is followed; what is no file (/dev/null, a pipe) is written to as it is.
    """
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data, level, mtime=0)  # the same data, the same file
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        _sweep(target)
        _renamed(target, data)
    except OSError as e:
        error = PresageError(f"{path}: cannot be written: {e.strerror or e}")
        error.exit_code = 1 if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else error.exit_code
        raise error from e


def check_writable(path: str | Path) -> None:
    """Raise where a file cannot be written: before the work, not after it."""
    target = Path(os.path.realpath(path))
    folder = target.parent
    if target.is_dir():
        raise PresageError(f"{path}: cannot be written: it is a folder")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder; make it first"
        raise PresageError(f"{path}: cannot be written: {Path(path).parent}: {what}")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise PresageError(f"{path}: cannot be written: permission denied")


def check_new_folder(path: Path) -> None:
    """Raise where a folder that is to be made is there already, with something in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PresageError(f"{path}: is there already; name a new folder (to add traces, give all of them again)")


def _renamed(target: Path, data: bytes) -> None:
    """Rename after flushing to disk: after a power cut the name has the old or the new contents."""
    handle, name = _neighbour(target)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(handle)
            if target.exists():
                os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)  # while it is open, and so locked
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def _neighbour(target: Path) -> tuple[int, Path]:
    """A new temporary file in the target's folder, locked while it is open."""
    while True:
        name = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}{PART}")
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        if not _locked(handle) or os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another's sweep came between the two calls


def _sweep(target: Path) -> None:
    """Remove temporary files left by killed writers: nobody holds their lock."""
    for left in target.parent.glob(f".{escape(target.name[:40])}.*{PART}"):
        try:
            handle = os.open(left, os.O_RDONLY)
        except OSError:
            continue  # it has gone, or is another user's
        try:
            if _locked(handle, wait=False):
                left.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _locked(handle: int, wait: bool = True) -> bool:
    """Whether the file could be locked; False where the system has no file locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
