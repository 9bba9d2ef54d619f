"""The wheel and the sdist: what is in them, and that the wheel works in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest

Requirement = pytest.importorskip("packaging.requirements").Requirement

ROOT = Path(__file__).resolve().parents[2]
MOST = 17.5e6  # bytes of either, most of them trees of kernels: the raw measurements stay out


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


@pytest.mark.parametrize("fetched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["linked", "fetched"])
def test_the_wheel_in_a_fresh_environment_passes_the_smoke_tests(built: Path, tmp_path: Path, fetched: bool) -> None:
    """With what it says it needs and nothing else, linked from here or fetched by pip: 500 MB."""
    (wheel,) = built.glob("*.whl")
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet")
    if not fetched:
        link_needed(_requirements(zipfile.Path(wheel)), packages)
    _run(*pip, "--no-compile", *(() if fetched else ("--no-index",)), str(wheel))
    (tmp_path / "empty").mkdir()
    version = wheel.name.split("-")[1]
    assert "smoke tests passed" in _run(
        python, str(ROOT / "tests" / "install" / "smoke.py"), str(tmp_path / "empty"), version
    )


def _requirements(wheel: zipfile.Path) -> list[str]:
    (about,) = (p / "METADATA" for p in wheel.iterdir() if p.name.endswith(".dist-info"))
    return message_from_string(about.read_text()).get_all("Requires-Dist") or []


def link_needed(requirements: Sequence[str], packages: Path) -> None:
    """Link the packages of this environment that are required, and those that they require."""
    for text in requirements:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        found = distribution(needed.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
                link_needed(found.requires or (), packages)


def test_the_changelog_tells_of_this_version(built: Path) -> None:
    version = next(built.glob("*.whl")).name.split("-")[1]
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


def _run(*args: str) -> str:
    done = subprocess.run(args, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(args)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
