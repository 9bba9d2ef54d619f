"""Kills, full disks and folders that cannot be written to: the old file or the new one, whole, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from presage.errors import PresageError
from presage.files import write_whole
from presage_fit.calibrate.resume import count_rows, whole_parts

ROOT = Path(__file__).resolve().parents[2]
KILLS = ROOT / "tools" / "kills.py"


def test_killed_commands_leave_the_old_file_or_the_new_one() -> None:
    """Between any two steps of a write (forks), and at a random moment of a process's life."""
    done = subprocess.run(
        [sys.executable, KILLS, "--kills", "3", "--only", "job,fit,calibrate", "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    scores = {s["command"]: s for s in json.loads(done.stdout)}
    assert not any(s["lost"] for s in scores.values())
    assert scores["job --json --trace"]["kills"] > 8 and scores["job --json --trace"]["new_whole"] > 0
    assert scores["fit --out"]["old_kept"] > 4
    assert scores["calibrate"]["resumed"] > 0


# ---- one write


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_whole(target, b"new")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].endswith(".part")
    write_whole(target, b"newer")
    assert names(tmp_path) == ["a.json"] and target.read_bytes() == b"newer"


def test_a_living_writers_neighbour_is_left_alone(tmp_path: Path) -> None:
    """Eight writers of one file at once: none loses its own, and the file is one of theirs."""
    target, failed = tmp_path / "a.json", []

    def write(k: int) -> None:
        try:
            for _ in range(25):
                write_whole(target, b"%d" % k * 5000)
        except PresageError as e:
            failed.append(e)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and names(tmp_path) == ["a.json"]
    assert target.read_bytes() in {b"%d" % k * 5000 for k in range(8)}


def test_links_modes_and_devices(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new", "a link is followed, not replaced"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600, "a private file stays private"
    write_whole(os.devnull, b"gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode), "a device stays one"
    write_whole(tmp_path / ("n" * 255), b"")  # as long as names can be
    (tmp_path / "日本語 [*].json").write_bytes(b"")
    write_whole(tmp_path / "日本語 [*].json", b"x")
    assert not [n for n in names(tmp_path) if n.endswith(".part")]


def limited(folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    """presage with a disk that has no more room than this for a file."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        f"import sys; sys.argv[1:] = ['gpus', '--json', {str(folder / 'a.json')!r}]\n"
        "from presage.cli import main; main()"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_a_full_disk_is_a_sentence_and_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"old")
    done = limited(tmp_path, 4096)
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_bytes() == b"old"


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for bad in (
        tmp_path / "folder",
        tmp_path / "none" / "a.json",
        tmp_path / "file" / "a.json",
        tmp_path / ("n" * 400),
    ):
        with pytest.raises(PresageError, match="cannot be written"):
            write_whole(bad, b"x")
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="whoever runs this may write anywhere")
def test_a_folder_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PresageError, match="cannot be written: Permission denied"):
        write_whole(tmp_path / "a.json", b"x")


# ---- rows that are appended


def test_a_torn_last_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "gemm.jsonl"
    assert count_rows(path) == 0
    path.write_bytes(b'{"p":1}\n{"p":2}\n{"p"')
    assert count_rows(path) == 2 and path.read_bytes() == b'{"p":1}\n{"p":2}\n'
    path.write_bytes(b'{"p"')
    assert count_rows(path) == 0 and path.read_bytes() == b""


def test_a_torn_row_takes_its_part_along(tmp_path: Path) -> None:
    path = tmp_path / "overlap.jsonl"
    assert whole_parts(path) == set()
    path.write_bytes(b'{"part":"a"}\n{"part":"b"}\n{"part":"b"}\n{"pa')
    assert whole_parts(path) == {"a"} and path.read_bytes() == b'{"part":"a"}\n'
    path.write_bytes(b'{"part":"a"}\n{"part":"b"}\n')
    assert whole_parts(path) == {"a", "b"}


def test_a_pack_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, its folder is not there; the next run starts anew."""
    from presage_fit import pack

    told = {"presage_pack": 2, "gpu": "G", "sms": 1, "memory_bytes": 1, "l2_bytes": 1, "torch": "2", "cuda": "13"}
    more = {"cudnn": 9, "host": "h", "python": "3", "date": "2026-01-01"}
    small = pack.Pack(msgspec.convert(told | more, pack.Header), {}, {"latencies": [{"us": 1.0}]}, (), ())

    def full(*_: object, **__: object) -> None:
        raise PresageError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(pack, "write_whole", full)
        with pytest.raises(PresageError):
            pack.write(small, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pack.write(small, tmp_path / "out")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["header.json", "latencies.json"]


# ---- compiled functions, kept on disk and shared


SHARED = """
import numpy as np
from presage.engine.compiled import compiled_at_once

@compiled_at_once
def total(x):
    out = x.dtype.type(0)
    for v in x:
        out += v
    return out

print(total(np.arange(100.0)), total(np.arange(100)))
"""
RIGHT = "4950.0 4950\n"


def summing(folder: Path, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    call = [sys.executable, "-c", "import summing"]
    return subprocess.Popen(call, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_share_what_is_compiled_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Started at once on an empty cache, one of them killed; then with every file cut off; then another call's code."""
    cache = tmp_path / "cache"
    (tmp_path / "summing.py").write_text(SHARED)
    several = [summing(tmp_path, cache) for _ in range(4)]
    several[0].kill()
    assert [p.communicate()[0] for p in several[1:]] == [RIGHT] * 3
    kept = sorted(cache.rglob("*.nb[ic]"))
    assert len(kept) == 3, "an index, and code for whole and for other numbers"
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    assert summing(tmp_path, cache).communicate() == (RIGHT, "")
    one, other = sorted(cache.rglob("*.nbc"))
    one.write_bytes(other.read_bytes())
    assert summing(tmp_path, cache).communicate() == (RIGHT, "")


def test_where_nothing_can_be_kept_functions_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    from presage.engine.compiled import compiled

    def nowhere(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching.CompileResultCacheImpl, "__init__", nowhere)
    assert compiled(lambda x: x + 1)(2) == 3


WORKERS = """
import os, sys, time
from presage.pool import processes

def told(k):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write at once
    time.sleep(60)

with processes(2) as pool:
    list(pool.map(told, range(2)))
"""


def test_workers_end_with_the_one_that_started_them() -> None:
    """A search that is killed leaves no process behind."""
    started = subprocess.Popen([sys.executable, "-c", WORKERS], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    workers = [int(started.stdout.readline()) for _ in range(2)]
    started.kill()
    started.wait()
    until = time.monotonic() + 20
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < until, "workers outlive the process they work for"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
