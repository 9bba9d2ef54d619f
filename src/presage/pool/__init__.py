"""Where work is done: here, in threads or processes of this machine, or on a Ray cluster. The answer is the same."""

from presage.pool.opened import opened
from presage.pool.pool import BESIDE, SERIAL, Pool, Serial, Threads
from presage.pool.processes import processes
from presage.pool.raycluster import ray_cluster

__all__ = ["BESIDE", "SERIAL", "Pool", "Serial", "Threads", "opened", "processes", "ray_cluster"]
