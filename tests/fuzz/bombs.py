"""Files made to fill the memory or the time: how much of either their readers take before they say no.

Each is read in a process of its own, whose memory is bounded. Made of pieces that repeat, so that making them is quick.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path

PIECE = 16 << 20
GIB = 1 << 30
LEFT = 3 * GIB  # address space that a reader may take


@dataclass(frozen=True)
class Bomb:
    """What it is, in words; the reader it is for (fuzz.readers), its file, and how to write it."""

    name: str
    reader: str
    file: str
    write: Callable[[Path], None]


def repeated(path: Path, start: bytes, piece: bytes, times: int, end: bytes = b"") -> None:
    """A gzip file that unpacks to the start, so many pieces, and the end."""
    packed = gzip.compress(piece, 9, mtime=0)
    with path.open("wb") as f:
        f.write(gzip.compress(start, mtime=0))
        for _ in range(times):
            f.write(packed)
        f.write(gzip.compress(end, mtime=0))


def _gzip(start: bytes, unit: bytes, size: int = 10 * GIB) -> Callable[[Path], None]:
    return lambda path: repeated(path, start, unit * (PIECE // len(unit)), size // PIECE)


def _sparse(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as f:
            f.truncate(size)

    return write


def _plain(text: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(text()) and None


def _zip(path: Path) -> None:
    """An entry of 64 MiB that the list of contents names a hundred times."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a.npy", bytes(64 << 20))
        for i in range(100):
            again = copy(z.filelist[0])
            again.filename = f"a{i}.npy"
            z.filelist.append(again)


def _claim(path: Path) -> None:
    import numpy as np

    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    path.write_bytes(out.getvalue() + bytes(64))


def _graph(path: Path) -> None:
    """A saved graph that claims ten million ops; one stream of blocks that stand alone, and so repeat."""
    packer = zlib.compressobj(9, wbits=31)
    start = packer.compress(b"\x81\xa3ops\xdd\x00\x98\x96\x80") + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(PIECE)) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(b"presage graph 1\n" + start + block * (4 * GIB // PIECE))


def _dotted() -> bytes:
    return b"a" + b".a" * 200_000 + b" = 1\n"


def _nodes() -> bytes:
    one = b'{"id":1,"name":"a","inputs":[],"outputs":[]},'
    return b'{"schema":"1.0.1","nodes":[' + one * 10_000_000 + b"{}]}"


BOMBS = (
    Bomb("10 GiB of zeros in 10 MB of gzip", "Kineto trace", "a.json", _gzip(b"", b"\0")),
    Bomb("10 GiB of events in gzip", "Kineto trace", "a.json", _gzip(b'{"traceEvents":[', b"{},")),
    Bomb("10 GiB of spaces in gzip", "Kineto trace", "a.json", _gzip(b"[", b" ")),
    Bomb("a plain file of 20 GiB", "Kineto trace", "a.json", _sparse(20 * GIB)),
    Bomb("an event of 200 MB", "Kineto trace", "a.json", _plain(lambda: b'[{"a":"' + b"},{" * (70 << 20) + b'"}]')),
    Bomb("10 GiB of zeros in a folder of traces", "folder of traces", "1.json.gz", _gzip(b'{"traceEvents":[', b"\0")),
    Bomb("10 GiB of zeros in gzip", "PyTorch execution trace", "a.json", _gzip(b"", b"\0")),
    Bomb("10 GiB in gzip", "table of operations", "a.csv", _gzip(b"optype,", b"a,b,c\n")),
    Bomb("10 GiB in gzip", "MLPerf log", "log.json", _gzip(b"[", b"[],")),
    Bomb("10 GiB in gzip", "calibration pack", "gemm.jsonl", _gzip(b"", b"{}\n")),
    Bomb("10 GiB in gzip", "job", "job.toml", _gzip(b"", b"# a comment\n")),
    Bomb("a key of 200,000 parts", "job", "job.toml", _plain(_dotted)),
    Bomb("100,000 brackets", "Hugging Face config", "config.json", _plain(lambda: b"[" * 100_000)),
    Bomb("ten million ops, 4 GiB in gzip", "saved graph", "a.presage", _graph),
    Bomb("6 GiB in a zip of 64 kB", "indices, .npz", "i.npz", _zip),
    Bomb("6 GiB in a zip of 64 kB", "fitted kernel models", "kernels.npz", _zip),
    Bomb("a header that claims 8 TB", "indices, .npy", "i.npy", _claim),
    Bomb("10 GiB of zeros in gzip", "indices, .npy", "i.npy", _gzip(b"\x93NUMPY\x01\x00", b"\0")),
)
LONG = (Bomb("ten million nodes, 450 MB", "PyTorch execution trace", "a.json", _plain(_nodes)),)


@dataclass(frozen=True)
class Told:
    """What came of a bomb."""

    said: str
    seconds: float
    memory: int  # bytes beyond what was held before


def tried(bomb: Bomb, folder: Path) -> Told:
    """Read it in a process with bounded memory."""
    from fuzz.readers import BY_NAME

    folder.mkdir(parents=True)
    reader = BY_NAME[bomb.reader]
    for name, data in reader.files[0].items():
        (folder / name).write_bytes(data)
    bomb.write(folder / bomb.file)
    target = folder / reader.target if reader.target else folder
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    args = [sys.executable, "-m", "fuzz.bombs", bomb.reader, str(target)]
    done = subprocess.run(args, capture_output=True, text=True, check=False, env=env, timeout=300)
    if done.returncode:
        return Told(f"died: {done.stderr[-400:]}", 0.0, 0)
    return Told(**json.loads(done.stdout.splitlines()[-1]))


def read(reader: str, target: Path) -> Told:
    """Here, after a sound file has been read and all modules are loaded."""
    from fuzz.attempt import attempt, peak_memory
    from fuzz.readers import BY_NAME
    from presage.errors import PresageError

    one = BY_NAME[reader]
    attempt(one, one.files[0], target.parent / "sound")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + LEFT, -1))
    before, start = peak_memory(), time.process_time()
    try:
        one.read(target)
        said = "read"
    except PresageError as e:
        said = str(e)
    except MemoryError:
        said = "died: MemoryError"
    return Told(said, time.process_time() - start, peak_memory() - before)


if __name__ == "__main__":
    print(json.dumps(vars(read(sys.argv[1], Path(sys.argv[2])))))
