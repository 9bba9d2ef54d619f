"""The command line: parse, call, print."""

from presage.cli.app import main

__all__ = ["main"]
