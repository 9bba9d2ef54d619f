"""The command line: parse, call, print."""

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Imported here, so that an interrupt during the import shows no traceback."""
    gc.set_threshold(
        50_000, 20, 20
    )  # a command makes much and drops little: a third of an import's time is collections
    try:
        from presage.cli.app import main as run
    except KeyboardInterrupt:
        print("presage: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
