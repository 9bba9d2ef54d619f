"""Fit what published tables of serving engines show of each GPU: writes src/presage/data/GPU/tables.npz.

    python tools/fit_tables.py ../shared [a100_80gb ...]

Reads SHARED/kernels/aiconfigurator. Only shapes of the fitted split (presage_fit/table_split.py) count. Two parts a
family: `own`, the kernel on a GPU without a calibration pack, as training runs it, beside the H200's corrections of its
law; and the engine, what a table's rows take beside that kernel. For `own` what the engines add is taken off: their
floor, down to that of a short kernel in a full queue, and the clock that falls under long repeats. Attention's
own part rests on long sequences with few key heads, where the cache that engines write does not show, and on the
collectors that run fused kernels (FUSED in chip_rows.py). Takes two minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from chip_rows import FUSED
from numpy.typing import NDArray

from presage.costs.calibrated_kernels import CalibratedKernels, call_times
from presage.costs.call import Call
from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.costs.corrections import TableCorrection
from presage.costs.corrections import table_features as own_features
from presage.costs.families import BY_OP
from presage.costs.kernel_files import FILE, SHIPPED, TABLES, load
from presage.costs.trees import Trees
from presage_fit.boosting import fit
from presage_fit.serving import ServingOverhead, heated, save_tables, serving_features
from presage_fit.table_split import FITTED, HELD, is_fitted
from presage_validation.kernel_tables import MeasuredKernel, read_table

Floats = NDArray[np.float64]
GPUS = {"a100_80gb": "a100_sxm", "h100_sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
SOURCE = "aiconfigurator 095f58a51c4c, Apache-2.0: bf16 products and causal prefill attention in serving engines"
CLOCK = 1980e6  # Hz, of the H200, where shortest kernels were timed
SHORTEST = {"gemm": 2e-6, "attention": 3e-6}  # seconds there, in a full queue
LEVEL, HOT = (3e-5, 4e-4), 4e-3  # seconds of products at the full clock, and of those with the clock fallen
LONG, KEY_HEADS = 2048, 4  # tokens; heads to one of keys
LEAF = 2.0**-13
NATIVE_FLASH = ("Ampere", "Ada")  # where PyTorch's flash kernels are as quick as any
FORWARD = {"cudnn": "aten::_cudnn_attention", "flash": "aten::_flash_attention"}


@dataclass(frozen=True)
class Rows:
    """The fitted shapes of a table."""

    kernel: str
    shapes: tuple[MeasuredKernel, ...]

    @property
    def seconds(self) -> Floats:
        return np.array([s.seconds for s in self.shapes])

    @property
    def calls(self) -> list[Call]:
        return [s.call for s in self.shapes]

    def only(self, keep: Sequence[bool]) -> Rows:
        return Rows(self.kernel, tuple(s for s, k in zip(self.shapes, keep, strict=True) if k))


def rows_of(path: Path, kernel: str) -> Rows:
    return Rows(kernel, tuple(s for s in read_table(path).shapes if is_fitted(kernel, s.sizes)))


def warm(models: CalibratedKernels, calls: Sequence[Call]) -> Floats:
    return np.array([t.warm for t in call_times(models, calls)])


def heat_of(rows: Rows) -> float:
    """How much more the longest products take over the chip's law, at the full clock, than shorter ones."""
    chip = ClosedFormKernels.of(rows.shapes[0].gpu)
    over = rows.seconds / np.array([chip.gemm(GemmShape(*s.sizes, rhs_k_major=True)) for s in rows.shapes])
    level = (rows.seconds > LEVEL[0]) & (rows.seconds < LEVEL[1])
    return max(0.0, float(np.median(over[rows.seconds > HOT]) / np.median(over[level]) - 1))


def unheated(seconds: Floats, heat: float) -> Floats:
    """Seconds at the full clock of kernels that collectors saw take `seconds`: the inverse of `heated`."""
    cool = seconds
    for _ in range(50):
        cool = cool * seconds / heated(cool, heat)
    return cool


def target(rows: Rows, seconds: Floats, floor: float, heat: float) -> Floats:
    """Seconds of the kernels alone, at the full clock: without the engine's floor but for a short kernel's."""
    shortest = SHORTEST[rows.kernel] * CLOCK / rows.shapes[0].gpu.boost_clock
    return unheated(np.maximum(seconds - max(0.0, floor - shortest), 0.5 * seconds), heat)


def own_trees(
    family: str, calls: Sequence[Call], seconds: Floats, models: CalibratedKernels, rounds: int, leaves: int
) -> Trees:
    law = BY_OP[calls[0].name].law
    x = np.array([own_features(family, c, law(c, models.rates), models.rates) for c in calls])
    return small(fit(x, np.log(seconds / warm(models, calls)), rounds=rounds, leaves=leaves, rate=0.1, min_leaf=10,
                     objective="huber", extra={"alpha": 0.3}))  # fmt: skip


def small(trees: Trees) -> Trees:
    """With leaves as multiples of a ten-thousandth or so, which take less room in a file."""
    return replace(trees, value=(np.round(trees.value / LEAF) * LEAF).astype(np.float32))


def own_gemm(rows: Rows, models: CalibratedKernels, heat: float) -> TableCorrection:
    floor = float(np.quantile(rows.seconds, 0.01))
    seconds = target(rows, rows.seconds, floor, heat)
    return TableCorrection("gemm", ("aten::",), own_trees("gemm", rows.calls, seconds, models, 150, 24))


def own_attention(rows: Rows, models: CalibratedKernels, heat: float) -> TableCorrection:
    """Chips have half the heat of products here too."""
    fused = FUSED[GPUS[models.gpu.key]]
    some = [[t for who, t in s.by if "".join(who.split()[:2]) in fused] for s in rows.shapes]
    floor = float(np.quantile([np.median(t) for t in some if t], 0.01))
    long = [bool(t) and _long(s) for s, t in zip(rows.shapes, some, strict=True)]
    kept = rows.only(long)
    seconds = np.array([np.median(t) for t, k in zip(some, long, strict=True) if k])
    seconds = target(kept, seconds, floor, heat / 2)
    both = models.gpu.architecture in NATIVE_FLASH
    pairs = [(c, t) for s, t in zip(kept.shapes, seconds, strict=True) for c in _ways(s.call, both)]
    calls, times = [c for c, _ in pairs], np.array([t for _, t in pairs])
    ops = tuple(FORWARD.values()) if both else (FORWARD["cudnn"],)
    return TableCorrection("attention", ops, own_trees("attention", calls, times, models, 60, 8))


def _long(s: MeasuredKernel) -> bool:
    _, length, heads, key_heads, _, window = s.sizes
    return length >= LONG and heads >= KEY_HEADS * key_heads and not window


def _ways(call: Call, both: bool) -> list[Call]:
    """The ops that this attention may be, of those that are corrected."""
    if not call.name.startswith(FORWARD["cudnn"]):
        return [call] if both else []
    q = call.tensors[0]
    b, h, s, d = q.sizes
    flat = replace(q, sizes=(b, s, h, d), strides=(s * h * d, h * d, d, 1))
    flash = Call(f"{FORWARD['flash']}_forward", (flat, flat, flat, None, None, s, s, 0.0, True, False, None))
    return [call, flash] if both else [call]


def engine(rows: Rows, models: CalibratedKernels, heat: float) -> ServingOverhead:
    """What the rows of a table take beside their kernels."""
    rates, kernel = models.rates, warm(models, rows.calls)
    names = sorted({who for s in rows.shapes for who, _ in s.by}, key=lambda n: (n.split()[0], n.split()[2:], n))
    shape = np.repeat(np.arange(len(rows.shapes)), [len(s.by) for s in rows.shapes])
    which = np.array([names.index(who) for s in rows.shapes for who, _ in s.by])
    seconds = np.array([t for s in rows.shapes for _, t in s.by])
    floors = tuple(_floor(seconds[which == i], kernel[shape[which == i]]) for i in range(len(names)))
    empty = fit(np.zeros((40, 1)), np.zeros(40), rounds=1)
    out = ServingOverhead(rows.kernel, tuple(names), floors, heat, empty)
    sizes = np.array([s.sizes for s in rows.shapes])
    x = np.column_stack([serving_features(rows.kernel, sizes, kernel, rates)[shape], out.codes(which)])
    trees = fit(x, np.log(seconds / out.base(which, kernel[shape])), rounds=250, leaves=31, rate=0.15, min_leaf=20,
                objective="huber", extra={"alpha": 0.3, "feature_fraction": 0.8})  # fmt: skip
    return replace(out, trees=small(trees))


def _floor(seconds: Floats, kernel: Floats) -> float:
    """What an engine's shortest kernels take besides."""
    short = kernel <= np.quantile(kernel, 0.05)
    return max(0.0, float(f"{np.median(seconds[short] - kernel[short]):.4g}"))


def fit_gpu(folder: Path, key: str) -> None:
    name = GPUS[key]
    gemm = rows_of(folder / f"{name}_gemm.csv.gz", "gemm")
    attention = rows_of(folder / f"{name}_context_attention.csv.gz", "attention")
    heat = float(f"{heat_of(gemm):.4g}")
    models = replace(load(key), own={})
    own = {}
    if not (SHIPPED / key / FILE).exists():
        own = {"gemm": own_gemm(gemm, models, heat), "attention": own_attention(attention, models, heat)}
    models = replace(models, own=own)
    engines = {"gemm": engine(gemm, models, heat), "attention": engine(attention, models, heat / 2)}
    counts = {r.kernel: len(r.shapes) for r in (gemm, attention)}
    split = f"one in {FITTED} of the shapes whose widths are not among the held fifth (one in {HELD})"
    out = SHIPPED / key / TABLES
    out.parent.mkdir(exist_ok=True)
    save_tables(out, own, engines, {"tables": SOURCE, "split": split, "shapes": counts})
    print(f"{out.name} of {key}: {counts}, heat {heat:.1%}, {out.stat().st_size / 1e3:.0f} kB", flush=True)


def main() -> None:
    folder = Path(sys.argv[1]) / "kernels" / "aiconfigurator"
    for key in sys.argv[2:] or GPUS:
        fit_gpu(folder, key)


if __name__ == "__main__":
    main()
