"""The command line: parse, call, print."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Imported here, so that an interrupt during the import shows no traceback."""
    try:
        from presage.cli.app import main as run
    except KeyboardInterrupt:
        print("presage: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
