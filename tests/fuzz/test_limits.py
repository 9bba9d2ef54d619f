"""Files that are no files, and files made to fill the memory: one sentence, soon, and little memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz.bombs import BOMBS, Bomb, repeated, tried
from fuzz.readers import READERS, Reader
from presage.errors import PresageError
from presage.files.reading import open_bytes, read_bytes, read_text

SINGLE = [r for r in READERS if r.target and r.name != "published slowdowns"]  # which may be absent
QUICK = {b.reader: b for b in BOMBS if b.reader in ("job", "saved graph", "indices, .npz", "table of operations")}


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Paths that are no files, with what should be said of them."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").write_bytes(b"")
    return {
        "folder": (tmp_path / "folder", "folder"),
        "pipe": (tmp_path / "pipe", "pipe or a device"),
        "device": (Path("/dev/zero"), "pipe or a device"),
        "loop": (tmp_path / "loop", "cannot be read"),
        "missing": (tmp_path / "missing", "no such file"),
        "empty": (tmp_path / "empty", "empty"),
    }


def test_what_is_no_file(odd: dict[str, tuple[Path, str]]) -> None:
    for name, (path, said) in odd.items():
        with pytest.raises(PresageError, match=said) as e:
            read_bytes(path)
        assert str(path) in str(e.value), name
    assert read_text(odd["empty"][0]) == ""
    with pytest.raises(PresageError, match="is not a valid file name"):
        read_bytes("a\0b")


@pytest.mark.parametrize("reader", SINGLE, ids=lambda r: r.name)
def test_every_reader_refuses_what_is_no_file(reader: Reader, odd: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    for name in ("folder", "pipe", "loop", "missing", "device"):
        path = tmp_path / "in" / reader.target
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(odd[name][0])
        with pytest.raises(PresageError) as e:
            reader.read(path)
        assert "\n" not in str(e.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a = 1")
    (tmp_path / "a").chmod(0)
    with pytest.raises(PresageError, match="Permission denied"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize("bomb", [BOMBS[0], *QUICK.values()], ids=lambda b: f"{b.reader}, {b.name}")
def test_bombs(bomb: Bomb, tmp_path: Path) -> None:
    """A few of them; `make fuzz` tries all."""
    found = tried(bomb, tmp_path / "in")
    assert found.said != "read" and not found.said.startswith("died"), found.said
    assert found.seconds < 5 and found.memory < 1 << 30, found


def test_what_is_large_but_real_is_read(tmp_path: Path) -> None:
    """A file that compresses as traces do, and one that compresses well but is small."""
    unit = os.urandom(4096)
    repeated(tmp_path / "a", b"", unit + b"[1, 2, 3]\n" * 40_000, 300)  # 120 MB, 50 times
    with open_bytes(tmp_path / "a") as stream:
        while stream.read(8 << 20):
            pass
    assert stream.taken == 300 * 404_096 > 100e6
    repeated(tmp_path / "b", b"", b"\n" * (1 << 20), 30)  # 30 MB, a thousand times
    assert len(read_bytes(tmp_path / "b")) == 30 << 20
