"""What is known of chips beside the tables: published figures, and general knowledge that is said to be such."""

from __future__ import annotations

TABLE = "bf16 products and attention forward: aiconfigurator's tables (Apache-2.0), medians of collectors"
FLOAT32 = "float32 products: NeuSight's tables (MIT)"
BACK = (
    "attention backward, fp8, experts' products: as they are to the forward, to bf16 and to single products on an H200"
)
SIMUMAX = "MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json (Apache-2.0)"
MAMF = "github.com/stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS (2024 to 2026)"
FACTS = {
    "h200": "measured by ourselves: data/h200_pack and data/h200_jobs (PyTorch 2.11, CUDA 13.0, cuDNN 9.19, 2026-11)",
    "a100_80gb": f"{TABLE}; {FLOAT32}, of the 40 GB PCIe card; {BACK}; energies: the H200's by the process (TSMC's "
    "figures); streams: NeuSight's tables, others by the rate of instructions",
    "h100_sxm": f"bf16 products: as the A100's; {FLOAT32}; the rest is the H200's, which has the same SMs",
    "b200": f"{TABLE}; {BACK}; energy in bf16 and streams: {SIMUMAX}, by the rate of instructions",
    "l40s": f"{TABLE}; {BACK}",
    "v100_pcie_32gb": f"{FLOAT32}; tensor cores as on an A100; its sustained share by general knowledge",
    "l4": f"{FLOAT32}; the rest as shares of the peak as on an L40S",
    "t4": f"{FLOAT32}; the rest as on a V100",
    "p100_pcie": f"{FLOAT32}; the rest as on a V100",
    "mi210": f"{FLOAT32}, which run on matrix units there; bf16 products reach 0.77 of the peak: {MAMF}, MI250X",
    "mi300x": f"bf16 products, 668 to 782 TFLOP/s sustained: {MAMF}; fused attention by general knowledge",
}
RELATED = {"l4": "l40s", "v100_pcie_32gb": "a100_80gb", "t4": "v100_pcie_32gb", "p100_pcie": "v100_pcie_32gb",
           "mi300x": "mi210"}  # fmt: skip
# Of the memory bandwidth that copies reach: our H200; NeuSight's element-wise kernels.
SHARES = {"h200": 0.88, "a100_80gb": 0.87, "v100_pcie_32gb": 0.90, "l4": 0.78, "t4": 0.74, "p100_pcie": 0.74}
# On the H200, by kind of kernel: medians of large calls of the pack, casts of data/h200_jobs.
STREAMS = {
    "copy": 0.88, "pointwise": 0.85, "norm": 0.66, "norm_backward": 0.45, "softmax": 0.55, "loss": 0.5,
    "optimizer": 0.67, "dropout": 0.65, "cast": 0.72, "embedding": 0.45, "reduce": 0.57, "other": 0.8,
    "permute": 0.5,  # rows of tokens to their experts: SimuMax's B200 file has 0.50 and 0.51
}  # fmt: skip
# Energy a FLOP over the H200's, which we measured. The tables' clocks fall less, for their calls are too few to heat a
# GPU. H100: the same die. A100: TSMC's N7 against its N5 class, of which TSMC says 30% less power at one speed (general
# knowledge). B200: large bf16 products measured for a training simulator reach 0.45 to 0.51 of 2,250 TFLOP/s for good
# (SimuMax's file); a like process alone would say 1.0, as is taken for other types of number.
ENERGIES = {"h100_sxm": 1.0, "a100_80gb": 1.43, "b200": 1.2}
ENERGIES_OF = {"b200": ("bf16", "fp16")}
# Of the memory bandwidth on an A100, where other kernels than copies differ from the H200's: NeuSight's softmax and
# norms; for the others, kernels bound by instructions: its SMs have 0.58 of the H200's rate, its memory 0.42.
A100_STREAMS = {
    "norm": 0.66, "norm_backward": 0.55, "softmax": 0.72, "loss": 0.66, "optimizer": 0.8, "dropout": 0.82, "cast": 0.8,
    "embedding": 0.55, "reduce": 0.75,
}  # fmt: skip
# A B200 has 1.67 times the H200's bandwidth and 1.11 times its rate of instructions, so kernels reach less of it: 0.67
# of the share. SimuMax's B200 file says 0.67 for most, 0.5 for permutations, 0.28 for the fused loss.
B200_STREAMS = {
    "pointwise": 0.67, "norm": 0.5, "norm_backward": 0.34, "softmax": 0.4, "loss": 0.33, "optimizer": 0.5,
    "dropout": 0.5, "cast": 0.55, "embedding": 0.34, "reduce": 0.43, "other": 0.67, "permute": 0.5,
}  # fmt: skip
OWN_STREAMS = {"a100_80gb": A100_STREAMS, "b200": B200_STREAMS}
# How much longer large products take for good than at the full clock, where no table shows it (general knowledge).
SUSTAINED = {"v100_pcie_32gb": 1.05, "mi210": 1.05, "mi300x": 1.3}
# Of the peak that products reach at the full clock where no table says it, from the sustained rates named above.
REACH = {"v100_pcie_32gb": {"bf16": 0.8}, "mi210": {"bf16": 0.81}, "mi300x": {"bf16": 0.68, "fp32": 0.68}}
# Fused attention there is FlashAttention-2's, at about these shares of the peak (general knowledge).
ALIKE = {"mi210": 0.38, "mi300x": 0.38}
# Reach in fp8 over that in bf16 beyond Hopper: a B200 0.763 / 0.776, a GB200 0.723 / 0.729 (the same list).
FP8 = 0.985
# FlashAttention-2 is about twice as fast as its predecessor both ways (arXiv 2307.08691, abstract).
FLASH1 = 0.5
