"""Pools that run work in this process, in threads or processes of this machine, or on Ray, with the same result."""

from presage.pool.choose import open_pool
from presage.pool.pool import SERIAL, THREADS_2, Pool, Serial, Threads
from presage.pool.processes import processes
from presage.pool.raycluster import ray_cluster

__all__ = ["SERIAL", "THREADS_2", "Pool", "Serial", "Threads", "open_pool", "processes", "ray_cluster"]
