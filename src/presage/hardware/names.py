"""GPUs by the names used in tables and logs: "A100-SXM4-40GB", "NVIDIA_H100_80GB_HBM3", "H100-96GB-HBM2e(500W)"."""

from __future__ import annotations

import re
from functools import cache

from presage.errors import PresageError
from presage.hardware.gpu import Gpu, gpu, gpus

# What is in a name, the signs between its words being blanks, and the GPU it then is: the first that fits.
NAMES = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"gh200", "gh200"),
    (r"h200.*nvl(?!ink)", "h200_nvl"),
    (r"h200", "h200"),
    (r"h100.*(96 ?gb?\b|hbm2e|500 ?w)", "h100_sxm_96gb"),
    (r"h100.*nvl(?!ink)", "h100_nvl"),
    (r"h[18]00.*pcie|pcie.*h[18]00", "h100_pcie"),
    (r"h100", "h100_sxm"),
    (r"h800", "h800"),
    (r"h20\b", "h20"),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100_pcie_40gb"),
    (r"a[18]00.*pcie|pcie.*a[18]00", "a100_pcie_80gb"),
    (r"a100.*40", "a100_40gb"),
    (r"a100", "a100_80gb"),
    (r"a800", "a800"),
    (r"v100s?.*pcie|pcie.*v100", "v100_pcie_32gb"),
    (r"v100.*16", "v100_16gb"),
    (r"v100", "v100_32gb"),
    (r"p100", "p100_pcie"),
    (r"titan xp", "titan_xp"),
    (r"l40s", "l40s"),
    (r"\bl40\b", "l40"),
    (r"\bl4\b", "l4"),
    (r"\ba40\b", "a40"),
    (r"\ba10g?\b", "a10"),
    (r"\bt4\b", "t4"),
    (r"3090", "rtx3090"),
    (r"4080(?! super)", "rtx4080"),
    (r"4090", "rtx4090"),
    (r"5090", "rtx5090"),
    (r"\ba6000\b", "rtxa6000"),
    (r"6000 ada", "rtx6000ada"),
    (r"mi355", "mi355x"),
    (r"mi325", "mi325x"),
    (r"mi300x?\b", "mi300x"),
    (r"mi250x", "mi250x"),
    (r"mi250", "mi250"),
    (r"mi210", "mi210"),
)


@cache
def gpu_by_name(text: str) -> Gpu:
    """The GPU for a name used in tables and logs, a key, a driver's name or a .toml file."""
    if text.endswith(".toml"):
        return gpu(text)
    words = " ".join(re.split(r"[\s_,;/()\[\]-]+", text.lower())).strip()
    for known in gpus():
        if text.lower() == known.key or words in (" ".join(n.lower().split("-")) for n in known.driver_names):
            return known
    key = next((key for pattern, key in NAMES if re.search(pattern, words)), None)
    if key is None:
        raise PresageError(f"unknown GPU {text!r}: see `presage gpus`")
    return gpu(key)
