"""A platform from a few words: which GPU, how many a node, and how fast the network between nodes is.

Within a node GPUs have their own links: NVLink through switches (eight, sixteen, a rack of 72) or to each other (four),
AMD's Infinity Fabric to each other, else PCIe through the host. Bridges between pairs of PCIe cards are not counted.
A network's rate is the node's, all cards together, and its GPUs share it alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from presage.errors import PresageError
from presage.hardware.architecture import architecture
from presage.hardware.gpu import Gpu
from presage.hardware.names import gpu_by_name
from presage.hardware.platform import NetworkLink, Platform, platforms

US, GBIT = 1e-6, 1e9 / 8
REDUCES = ("nvlink4", "nvlink5")  # whose switches can
# GPUs whose NVLinks join two cards only.
BRIDGED = ("a100_pcie_40gb", "a100_pcie_80gb", "a40", "h100_nvl", "h100_pcie", "rtx3090", "rtxa6000")
RACK = {"gb200": 72, "gb300": 72}
USED_XGMI = 0.75  # of an Infinity Fabric link: 48 of 64 GB/s (rocm.blogs.amd.com, RCCL bandwidth on MI300X, 2025-03)
QUAD_VOLTA = 2 / 3  # of six NVLinks four go to the three others of four V100
NODES = 131_072  # more than anyone has
# Latency of a hop, and what the fabric is called in platform files, which say where these are from. Slingshot and
# Omni-Path are taken as RoCE is; EFA's generation goes with the GPU's.
FABRICS = {"infiniband": 5.0, "roce": 6.0, "omnipath": 6.0, "slingshot": 6.0, "ethernet": 25.0, "efa": 70.0}
CALLED = {"ethernet": "tcp", "slingshot": "roce"}
EFA = {"nvlink3": ("efa1", 70.0), "nvlink4": ("efa2", 40.0), "nvlink5": ("efa3", 15.0)}
# Gb/s of network a GPU that are usual, by GPU, then by generation of its links; a PCIe card shares 100 Gb/s with eight.
USUAL_BY_GPU = {
    "b300": 800.0,
    "gb300": 800.0,
    "l40s": 50.0,
    "h100_nvl": 50.0,
    "h200_nvl": 100.0,
    "mi250": 100.0,
    "mi250x": 100.0,
    "mi210": 25.0,
}
USUAL = {"nvlink2": 50.0, "nvlink3": 200.0, "nvlink4": 400.0, "nvlink5": 400.0, "xgmi": 400.0}
USUAL_PCIE = 12.5


def cluster(
    gpu: str | Gpu,
    per_node: int,
    network_Gbps: float | None = None,
    *,
    fabric: str = "infiniband",
    domain: int | None = None,
    nics: int | None = None,
    name: str = "",
) -> Platform:
    """A platform of nodes with `per_node` GPUs and a network (default: the typical one for the GPU). `domain`: GPUs per
    NVLink domain if larger than a node. A platform that ships with presage is returned where it is equal."""
    chip = gpu_by_name(gpu) if isinstance(gpu, str) else gpu
    _check(per_node, network_Gbps, fabric, domain)
    out = _synthetic_platform(chip, per_node, network_Gbps, fabric, domain, nics)
    return replace(out, name=name) if name else out


@cache
def _synthetic_platform(
    chip: Gpu, per_node: int, gbps: float | None, fabric: str, domain: int | None, nics: int | None
) -> Platform:
    given = usual_network(chip, per_node) if gbps is None else gbps
    near = _near(chip, per_node, domain or RACK.get(chip.key, per_node))
    far = _network(chip, fabric, near, given * GBIT / per_node, nics or per_node)
    key = f"{per_node}x{chip.key}-{far.name}-{given:g}G"
    text = f"{per_node} {chip.name} a node, {given:g} Gb/s {far.name}"
    out = Platform(key, text, chip, (*near, far))
    same = (p for p in platforms() if p.gpu == chip and _alike(p.links, out.links))
    return next(same, out)


def usual_network(chip: Gpu, per_node: int) -> float:
    """Typical network bandwidth of a node with this many GPUs of a kind, in Gb/s."""
    kind = _kind(chip, per_node)
    return per_node * USUAL_BY_GPU.get(chip.key, USUAL.get(kind, USUAL_PCIE))


def _check(per_node: int, gbps: float | None, fabric: str, domain: int | None) -> None:
    if per_node < 1:
        raise PresageError(f"a node cannot have {per_node} GPUs")
    if gbps is not None and not 0 < gbps < 1e6:
        raise PresageError(f"a node cannot have {gbps:g} Gb/s of network")
    if fabric not in FABRICS:
        raise PresageError(f"unknown network {fabric!r}: choose from {', '.join(FABRICS)}")
    if domain is not None and (domain < 1 or (domain % per_node and per_node % domain)):
        raise PresageError(
            f"{domain} GPUs that share NVLink and {per_node} in a node: one must be a multiple of the other"
        )


def _kind(chip: Gpu, per_node: int) -> str:
    """The kind of link within a node."""
    if chip.link is None or chip.key in BRIDGED or (chip.key == "h200_nvl" and per_node > 4):
        return "pcie"
    return architecture(chip.architecture).link


def _near(chip: Gpu, per_node: int, domain: int) -> tuple[NetworkLink, ...]:
    """The links within a node or NVLink domain."""
    kind = _kind(chip, per_node)
    if kind == "pcie":
        return (_pcie(chip, per_node),)
    inner = _mesh(chip, kind, domain) if kind == "xgmi" or domain == 4 else _switch(chip, kind, domain)
    return (inner, _pcie(chip, per_node)) if domain < per_node else (inner,)


def _pcie(chip: Gpu, ranks: int) -> NetworkLink:
    return NetworkLink("pcie", "pcie", ranks, chip.pcie, 1.0 * US, "host", False)


def _mesh(chip: Gpu, kind: str, ranks: int) -> NetworkLink:
    assert chip.link is not None
    share = USED_XGMI if kind == "xgmi" else QUAD_VOLTA if kind == "nvlink2" else 1.0
    return NetworkLink("xgmi" if kind == "xgmi" else "nvlink", kind, ranks, chip.link * share, 0.6 * US, "mesh", False)


def _switch(chip: Gpu, kind: str, ranks: int) -> NetworkLink:
    assert chip.link is not None
    topology = "cube" if kind == "nvlink2" and ranks == 8 else "switch"
    return NetworkLink("nvlink", kind, ranks, chip.link, 0.6 * US, topology, kind in REDUCES)


def _network(chip: Gpu, fabric: str, near: tuple[NetworkLink, ...], bandwidth: float, nics: int) -> NetworkLink:
    """One network tier over all nodes; a NIC is never faster than the links between GPUs."""
    called, latency = CALLED.get(fabric, fabric), FABRICS[fabric]
    if fabric == "efa":
        newer = chip.key in ("h200", "h200_nvl")
        called, latency = EFA["nvlink5"] if newer else EFA.get(near[0].fabric, ("efa1", FABRICS["efa"]))
    within = min(k.bandwidth for k in near)
    reach = max(k.ranks for k in near)
    return NetworkLink(fabric, called, reach * NODES, min(bandwidth, within), latency * US, "fat-tree", False, nics)


def _alike(one: tuple[NetworkLink, ...], other: tuple[NetworkLink, ...]) -> bool:
    """Whether links are equal, apart from the reach of the last one and rounding."""
    if len(one) != len(other):
        return False
    return all(_same(a, b) for a, b in zip(one, other, strict=True))


def _same(a: NetworkLink, b: NetworkLink) -> bool:
    if (a.fabric, a.topology, a.in_network) != (b.fabric, b.topology, b.in_network):
        return False
    near = abs(a.bandwidth / b.bandwidth - 1) < 1e-6 and abs(a.latency / b.latency - 1) < 1e-6
    return near and (a.topology == "fat-tree" or a.ranks == b.ranks)
