"""What is known about GPUs and hosts, as values with their sources. The facts are TOML files, units in their keys."""

from presage.hardware.gpu import Gpu, gpu, gpus
from presage.hardware.host import Host, host, hosts

__all__ = ["Gpu", "Host", "gpu", "gpus", "host", "hosts"]
