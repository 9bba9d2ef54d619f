"""The command line: parse, call, print."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. It is loaded here, so that who interrupts that sees no traceback either."""
    try:
        from presage.cli.app import main as run
    except KeyboardInterrupt:
        print("presage: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
