"""How long something takes, of CPU time, on a machine that does other things too."""

from collections.abc import Callable
from time import process_time


def quickest(function: Callable[[], object], times: int = 3) -> float:
    """Seconds of the quickest of a few runs: what else goes on makes runs slower, never quicker."""

    def once() -> float:
        start = process_time()
        function()
        return process_time() - start

    return min(once() for _ in range(times))
