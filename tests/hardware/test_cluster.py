"""Platforms from a few words: GPUs by name, networks from texts, and collectives over many nodes."""

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.collectives import Collectives, RankGroup
from presage.errors import PresageError
from presage.hardware import cluster, gpu_by_name, gpus, platform
from presage.hardware.cluster import FABRICS, usual_network
from presage_validation.public_table import platform_name, platform_of_run, read_interconnect

GBIT = 1e9 / 8


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("A100", "a100_80gb"),
        ("NVIDIA_A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA_A100_80GB_PCIe", "a100_pcie_80gb"),
        ("A100-PCIE-40GB", "a100_pcie_40gb"),
        ("Tesla_V100-PCIE-32GB", "v100_pcie_32gb"),
        ("V100-SXM2-16GB", "v100_16gb"),
        ("H100-96GB-HBM2e(500W)", "h100_sxm_96gb"),
        ("H100-80GB-SXM", "h100_sxm"),
        ("H100-PCIe-80GB", "h100_pcie"),
        ("H100 NVL", "h100_nvl"),
        ("8x H100 (NVLink)", "h100_sxm"),
        ("H200-NVL", "h200_nvl"),
        ("H200-141GB-SXM", "h200"),
        ("GH200", "gh200"),
        ("h20", "h20"),
        ("GB300", "gb300"),
        ("B300", "b300"),
        ("AMD_Instinct_MI250", "mi250"),
        ("MI250X", "mi250x"),
        ("MI300X", "mi300x"),
        ("L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA_L4", "l4"),
        ("A10G", "a10"),
    ],
)
def test_gpus_by_what_people_call_them(text: str, key: str) -> None:
    assert gpu_by_name(text).key == key


def test_every_gpu_is_found_by_its_own_names() -> None:
    for known in gpus():
        assert gpu_by_name(known.key) == known and all(gpu_by_name(n) == known for n in known.driver_names)
    with pytest.raises(PresageError, match="unknown GPU 'TPUv4'"):
        gpu_by_name("TPUv4")


@pytest.mark.parametrize(
    ("gpu", "per_node", "text", "gbps", "fabric", "domain"),
    [
        ("A100-80GB-SXM", 8, "NVLink3+8xHDR200 IB (Selene)", 200, "infiniband", 8),
        ("A100-80GB-SXM", 8, "NVLink3+4xOmniPath100/node (Jean Zay)", 50, "omnipath", 8),
        ("A100-80GB-SXM", 8, "NVLink3 + 1600G RoCE/node", 200, "roce", 8),
        ("A100-80GB-SXM", 8, "NVLink3+4x100G RoCE/node", 50, "roce", 8),
        ("A100", 8, "NVLink3+800Gbps/node (per shipped configs)", 100, "infiniband", 8),
        ("H100-80GB-SXM", 8, "NVLink4 + 3200G (not printed)", 400, "infiniband", 8),
        ("H100-96GB-HBM2e(500W)", 8, "NVLink4+RDMA 400G/GPU (Grand Teton)", 400, "roce", 8),
        ("H100", 8, "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-", 400, "infiniband", 8),
        ("B200", 8, "InfiniBand; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC:", 400, "infiniband", 8),
        ("B200", 8, "NVLink5 1.8TB/s, 8x400Gb/s", 400, "infiniband", 8),
        ("B300", 8, "NVLink5+IB", 800, "infiniband", 8),
        ("GB200", 4, "4x ConnectX-7 IB NDR 400Gb/s", 400, "infiniband", 72),
        ("GB200", 72, "4x ConnectX-7 IB NDR 400Gb/s", 400, "infiniband", 72),
        ("GB200", 72, "NVL72", 400, "infiniband", 72),
        ("GB200", 4, "NVL36 + IB", 400, "infiniband", 36),
        ("GB300", 72, "NVL72 + IB", 800, "infiniband", 72),
        ("H200", 8, "ConnectX-6 25Gb/s Ethernet", 3.125, "tcp", 8),
        ("H100", 8, "50 GB/s per GPU, InfiniBand", 400, "infiniband", 8),
        ("A100", 8, "AWS p4de EFA", 50, "efa1", 8),
        ("MI250X", 8, "4x Slingshot 200G", 100, "roce", 8),
        ("V100", 8, "", 50, "infiniband", 8),
        ("A100", 8, "n/a", 200, "infiniband", 8),
    ],
)  # fmt: skip
def test_networks_as_tables_tell_them(
    gpu: str, per_node: int, text: str, gbps: float, fabric: str, domain: int
) -> None:
    found = platform_of_run(gpu, per_node, text)
    assert found.links[-1].bandwidth == pytest.approx(gbps * GBIT) and found.links[-1].fabric == fabric
    assert found.domain == domain


def test_every_row_of_the_public_table_has_a_platform(shared: Path) -> None:
    with (shared / "runs/public_runs.csv").open(newline="") as f:
        rows = {(r["gpu"], r["gpus_per_node"], r["interconnect"]) for r in csv.DictReader(f)}
    assert len(rows) > 40
    for gpu, node, text in rows:
        found = platform_of_run(gpu, int(node or 0), text)
        assert math.isfinite(Collectives.of(found).seconds("all_gather", 1e8, RankGroup(64, min(64, found.domain))))


@given(st.text(max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    found = read_interconnect(text, 8, 400)
    assert found.node_Gbps is None or found.node_Gbps >= 0
    try:
        platform_of_run("H100", 8, text)
    except PresageError as e:
        assert "\n" not in str(e)


def test_what_ships_is_found_again() -> None:
    for gpu, node, key in (
        ("a100_80gb", 8, "dgx-a100"),
        ("h100_sxm", 8, "dgx-h100"),
        ("h100_sxm", 4, "4xh100"),
        ("b300", 8, "dgx-b300"),
        ("gb300", 72, "gb300-nvl72"),
        ("gb200", 4, "gb200-nvl72"),
        ("mi325x", 8, "mi325x-ib"),
        ("v100_32gb", 16, "dgx-2"),
    ):
        assert cluster(gpu, node) is platform(key)
    assert cluster("a100_80gb", 8, 400, fabric="omnipath") is platform("jean-zay")
    assert cluster("h100_sxm_96gb", 8, fabric="roce") is platform("grand-teton")
    assert platform_name("H100-80GB-SXM", 8) == "dgx-h100"
    with pytest.raises(PresageError, match="no platform has 8 H100-PCIe-80GB a node"):
        platform_name("H100-PCIe-80GB", 8)


def test_every_gpu_makes_a_cluster() -> None:
    for known in gpus():
        for size in (1, 2, 4, 8, 16):
            for fabric in FABRICS:
                made = cluster(known, size, fabric=fabric)
                node = usual_network(known, size) * GBIT / size
                assert made.links[-1].bandwidth == pytest.approx(min(node, made.links[0].bandwidth))
                assert made.links[-1].bandwidth <= made.links[0].bandwidth and made.domain >= size
    assert cluster("h100_sxm", 8, 800, name="mine").name == "mine"
    assert [k.name for k in cluster("a100_80gb", 8, domain=4).links] == ["nvlink", "pcie", "infiniband"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"per_node": 0}, "a node cannot have 0 GPUs"),
        ({"network_Gbps": -1.0}, "a node cannot have -1 Gb/s"),
        ({"fabric": "pigeons"}, "unknown network 'pigeons': choose from infiniband"),
        ({"domain": 12}, "one must be a multiple of the other"),
    ],
)
def test_what_cannot_be_is_told(more: dict[str, object], said: str) -> None:
    with pytest.raises(PresageError, match=said):
        cluster("h100_sxm", **({"per_node": 8} | more))  # type: ignore[arg-type]


def test_thousands_of_ranks_are_sane() -> None:
    """Few bytes: all-reduces grow with the logarithm of ranks, and no more than a ring's hops at all. Many bytes: near
    the card's rate."""
    for key in ("dgx-a100", "dgx-h100", "jean-zay", "gb200-nvl72"):
        here = platform(key)
        model, card = Collectives.of(here), here.links[-1].bandwidth
        for near in (1, min(8, here.domain)):
            few, many = (RankGroup(n * near, near) for n in (16, 8192))
            assert model.seconds("all_reduce", 1024.0, many) < 4 * model.seconds("all_reduce", 1024.0, few)
            for op in ("all_gather", "reduce_scatter"):
                assert model.seconds(op, 1024.0, many) < many.ranks * 5e-6
            for op in ("all_reduce", "all_gather", "reduce_scatter"):
                bus = model.busbw(op, 64e9, RankGroup(256 * near, near)) / near
                assert 0.75 * card < bus <= 1.001 * card


def test_gathering_over_nodes_is_a_tree_where_a_ring_takes_longer() -> None:
    """One rank a node: NCCL's parallel aggregated trees win for few bytes and many ranks, the ring for many bytes."""
    model = Collectives.of(platform("dgx-h100"))
    per_rank = model.seconds("all_gather", 1024.0, RankGroup(1024, 1)) / 1024
    assert 2.8e-6 < per_rank < 3.2e-6  # a ring has 5
    assert model.busbw("all_gather", 64e9, RankGroup(1024, 1)) > 0.85 * 50e9  # the trees have three quarters
