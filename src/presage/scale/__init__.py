"""Where work is done: here, in threads or processes of this machine, or on a Ray cluster. The answer is the same."""

from presage.scale.opened import opened
from presage.scale.pool import BESIDE, SERIAL, Pool, Serial, Threads
from presage.scale.processes import processes
from presage.scale.raycluster import ray_cluster

__all__ = ["BESIDE", "SERIAL", "Pool", "Serial", "Threads", "opened", "processes", "ray_cluster"]
