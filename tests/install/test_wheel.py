"""The wheel and the sdist: what is in them, and that the wheel works in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 8e6  # bytes of either: the raw measurements stay out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder


def test_the_wheel_has_all_that_is_needed_and_no_more(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "presage/py.typed",
        "presage/data/h200/kernels.npz",
        "presage/report/html/page.html.j2",
        "presage/report/html/page.css",
        "presage/examples_shipped/jobs/llama3.1-405b.toml",
    ):
        assert name in names
    assert not [n for n in names if n.startswith(("tests/", "data/", "docs/")) or "__pycache__" in n]
    assert wheel.stat().st_size < MOST


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.stat().st_size < MOST
    with tarfile.open(sdist) as held:
        held.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= {p.name for p in folder.iterdir()}
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "again"), str(folder))
    (again,), (wheel,) = (tmp_path / "again").glob("*.whl"), built.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_in_a_fresh_environment_passes_the_smoke_tests(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--no-compile", str(wheel))
    (tmp_path / "empty").mkdir()
    version = wheel.name.split("-")[1]
    assert "smoke tests passed" in _run(
        python, str(ROOT / "tests" / "install" / "smoke.py"), str(tmp_path / "empty"), version
    )


def test_the_changelog_tells_of_this_version(built: Path) -> None:
    version = next(built.glob("*.whl")).name.split("-")[1]
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


def _run(*args: str) -> str:
    done = subprocess.run(args, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(args)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
