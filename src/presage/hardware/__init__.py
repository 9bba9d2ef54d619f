"""Data of GPUs, hosts and platforms with their sources, read from TOML files whose keys carry the units."""

from presage.hardware.cluster import cluster
from presage.hardware.gpu import Gpu, gpu, gpu_choice, gpus
from presage.hardware.host import Host, host, hosts
from presage.hardware.names import gpu_by_name
from presage.hardware.platform import NetworkLink, Platform, platform, platforms

__all__ = ["Gpu", "Host", "NetworkLink", "Platform", "cluster", "gpu", "gpu_by_name", "gpu_choice", "gpus"]
__all__ += ["host", "hosts", "platform", "platforms"]
