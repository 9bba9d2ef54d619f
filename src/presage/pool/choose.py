"""The pool for the --workers and --ray options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from presage.errors import PresageError
from presage.pool.pool import SERIAL, Pool
from presage.pool.processes import processes
from presage.pool.raycluster import ray_cluster


@contextmanager
def open_pool(workers: int = 1, ray: str | None = None, here: Pool = SERIAL, fresh: bool = False) -> Iterator[Pool]:
    """A Ray cluster, processes for more than one worker, else `here`. `fresh`: see `processes`."""
    if ray is not None and workers > 1:
        raise PresageError("--workers or --ray: say one of them, work is done in one place")
    if ray is not None:
        with ray_cluster(ray) as pool:
            yield pool
    elif workers > 1:
        with processes(workers, fresh) as pool:
            yield pool
    else:
        yield here
