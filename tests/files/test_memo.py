"""Results kept between processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from presage.files import memo


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRESAGE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_the_second_time_nothing_is_computed(folder: Path) -> None:
    assert memo.remembered("a", lambda: [1.5, 2.0]) == [1.5, 2.0]
    assert memo.remembered("a", lambda: [9.0]) == [1.5, 2.0]
    assert memo.remembered("b", lambda: [9.0]) == [9.0]
    assert len(list(folder.iterdir())) == 2


def test_a_changed_package_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    memo.remembered("a", lambda: [1.0])
    monkeypatch.setattr(memo, "fingerprint", lambda: "changed")
    assert memo.remembered("a", lambda: [2.0]) == [2.0]


@pytest.mark.parametrize("text", ["", "{", '["x"]', "{}"])
def test_damaged_files_are_computed_again(folder: Path, text: str) -> None:
    memo.remembered("a", lambda: [1.0])
    next(folder.iterdir()).write_text(text)
    assert memo.remembered("a", lambda: [2.0]) == [2.0]


def test_nothing_is_kept_where_that_is_off_or_impossible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file, not a folder")
    assert memo.remembered("a", lambda: [1.0]) == [1.0]
    monkeypatch.setenv("PRESAGE_CACHE", memo.OFF)
    assert memo.remembered("a", lambda: [2.0]) == [2.0]


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST", 3)
    for i in range(6):
        memo.remembered(str(i), lambda: [1.0])
    assert len(list(folder.iterdir())) == 3
