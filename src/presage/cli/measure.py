"""`presage measure`: run a step on this machine's GPU. Its options are those of `python -m presage.measure`."""

from __future__ import annotations

import typer

from presage.cli.options import current_output

__all__ = ["command"]


def command(context: typer.Context) -> None:
    """Run a training step on this machine's GPU: measured beside predicted, by family of ops (needs torch)."""
    from presage.measure.__main__ import main

    main([*context.args, *(["--quiet"] if current_output().quiet else [])])
