"""What is known about GPUs, hosts and platforms, as values with their sources. Facts are TOML, units in their keys."""

from presage.hardware.cluster import cluster
from presage.hardware.gpu import Gpu, gpu, gpus
from presage.hardware.host import Host, host, hosts
from presage.hardware.names import gpu_named
from presage.hardware.platform import NetworkLink, Platform, platform, platforms

__all__ = ["Gpu", "Host", "NetworkLink", "Platform", "cluster", "gpu", "gpu_named", "gpus"]
__all__ += ["host", "hosts", "platform", "platforms"]
