"""What others build on: exported names, commands with their options, exit codes, and how light the base is.

`python tests/cli/test_surface.py` writes tests/cli/surface.txt anew: a change of it is a change for users, and
belongs in the changelog.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import presage
from presage.cli import faults
from presage.cli.app import app

SNAPSHOT = Path(__file__).with_name("surface.txt")
HEAVY = ("torch", "ray", "plotly", "numba", "scipy", "dash", "numpy", "matplotlib", "lightgbm", "jinja2", "flask")
OWN_OPTIONS = ("calibrate", "measure")  # those of `python -m presage.NAME`
NO_JSON = ("ui",)  # it serves a page
CODES = {
    "answered": faults.ANSWERED, "unanswered": faults.UNANSWERED, "mistaken": faults.MISTAKEN,
    "condition_held": faults.CONDITION_HELD,
    "interrupted": faults.INTERRUPTED,
}  # fmt: skip


def surface() -> str:
    """All of it as text, a line a thing."""
    lines = [f"name {name}" for name in sorted(presage.__all__)]
    lines += [f"exit {name} {code}" for name, code in CODES.items()]
    for path, command in commands():
        lines.append(f"command {path}")
        lines += sorted(f"  {option}" for option in options(path, command))
    return "\n".join(lines) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its path, groups opened."""
    root = typer.main.get_command(app)
    yield "", root
    context = root.make_context("presage", [], resilient_parsing=True)
    for name in sorted(root.commands):  # type: ignore[attr-defined]
        command = root.get_command(context, name)  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        yield name, command
        yield from ((f"{name} {n}", c) for n, c in sorted(inner.items()))


def options(path: str, command: Any) -> list[str]:
    if path in OWN_OPTIONS:
        return [_argparsed(a) for a in _parser(path)._actions]
    return [_told(p) for p in command.params]


def _told(p: Any) -> str:
    names = "/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else f"<{p.name}>"
    return names + (" required" if p.required else "")


def _argparsed(a: argparse.Action) -> str:
    names = "/".join(sorted(a.option_strings, key=len, reverse=True)) or f"<{a.dest}>"
    return names + (" required" if a.required else "")


def _parser(name: str) -> argparse.ArgumentParser:
    from presage.measure.__main__ import _parser as measure
    from presage_fit.calibrate.__main__ import parser as calibrate

    return {"calibrate": calibrate, "measure": measure}[name]()


def test_the_surface_is_what_it_was() -> None:
    assert surface() == SNAPSHOT.read_text(), "if users should see this change: python tests/cli/test_surface.py"


def test_every_command_can_be_quiet_and_gives_json() -> None:
    for path, command in commands():
        if not path or hasattr(command, "commands"):
            continue
        found = " ".join(options(path, command))
        assert "--quiet" in found, path
        assert "--json" in found or path in NO_JSON, path
        if path not in OWN_OPTIONS:
            assert "--verbose" in found and ("--fail-if" in found) == ("--json" in found), path


def test_every_command_teaches_with_an_example() -> None:
    for path, command in commands():
        if path and path not in OWN_OPTIONS and not hasattr(command, "commands"):
            assert f"presage {path}" in command.help, path


def test_every_command_has_its_place_in_the_help() -> None:
    for path, command in commands():
        if path and " " not in path:
            assert command.rich_help_panel and 10 < len(command.short_help) < 90, path


def loaded(code: str) -> list[str]:
    """Which heavy modules some code loads, in a fresh process."""
    code += f"\nimport sys; print('', *[m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    "code",
    [
        "import presage",
        "import sys; sys.argv = ['presage', '--help']\nfrom presage.cli import main\ntry:\n    main()\n"
        "except SystemExit:\n    pass",
    ],
    ids=["import", "help"],
)
def test_the_base_is_light(code: str) -> None:
    assert loaded(code) == []


def test_importing_takes_less_than_half_a_second() -> None:
    from terminals import worked

    assert worked([sys.executable, "-c", "import presage"], times=5)[1] < 0.5


if __name__ == "__main__":
    SNAPSHOT.write_text(surface())


@pytest.mark.parametrize("old", ["JobPrediction", "Prediction", "Run", "RunPrediction", "Sure", "sure"])
def test_names_of_the_last_release_warn_and_work(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"presage.{old} is now presage"):
        assert getattr(presage, old).__name__ in presage.__all__


@pytest.mark.parametrize("name", ["Builder", "Timeline", "simulate"])
def test_engine_names_warn_and_work(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"presage.{name} is now presage.engine.{name}"):
        assert getattr(presage, name) is getattr(presage.engine, name)
    assert name not in dir(presage)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "presage", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == presage.__version__
