"""Commands of other packages, found by the entry points "presage.commands" and imported when they are run."""

from __future__ import annotations

from collections.abc import Callable

from presage.usercode import load_plugin

# The commands that ship, and where, for an installation whose entry points are older than they are.
COMMANDS = {
    "calibrate": "presage_fit.calibrate.__main__:main",
    "pack": "presage_fit.pack_command:command",
    "fit": "presage_fit.noise_command:command",
    "accuracy": "presage_validation.command:command",
}


def load_command(name: str) -> Callable[..., None]:
    """The function of a command; an error names the package it needs where that is not installed."""
    return load_plugin("presage.commands", name, COMMANDS[name], f"presage {name}")
