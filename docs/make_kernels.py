"""Score the kernel models on held-out shapes and on published tables, and write docs/kernels.md.

python docs/make_kernels.py ../shared
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from presage_fit.kernel_models import samples
from presage_fit.pack import Pack, read
from presage_validation.kernels import BETWEEN, GUESSED, NEVER, score_kernels, score_pack, within_bars
from presage_validation.score import AccuracyResult, Score

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / "data" / "h200_pack"
PAGE = Path(__file__).with_name("kernels.md")

LAWS = {
    "gemm": "whole waves of tiles over the SMs at the FLOP rate of the type of number, or the three matrices' bytes",
    "conv": "as a matrix product in tiles, weight gradients split; or the bytes; plus changes of layout",
    "attention": "thread blocks walk over tiles, in waves; plus the bytes of queries and keys",
    "rnn": "steps one after the other: a wait and a small product each; plus the inputs' product",
    "pointwise": "distinct bytes read and written, again where tensors lie otherwise; arithmetic that finds each place",
    "copy": "bytes read and written",
    "reduce": "the launch: bytes in sectors, those read again, instructions, and what each thread waits for",
    "scan": "rows one after the other in a block, or blocks side by side",
    "resample": "the launch: places, taps, sectors; gradients added by atomics, a chain where few places take them",
    "fft": "passes over the bytes",
    "grouped": "each group's tiles, in waves over all groups",
    "norm": "the launches: blocks of channels, groups or rows in waves, places one after the other, what is read again",
    "softmax": "bytes of the rows read and written",
    "embedding": "rows through cache and memory; gradients by a sort and partial sums, a chain for the commonest row",
    "index": "rows moved; added with atomics or in order, a chain for the commonest row",
    "sort": "radix passes, or one thread block a row",
    "pool": "the launch: windows, sectors, additions that wait for each other",
    "random": "bytes written",
    "optimizer": "bytes of all lists, and one launch per chunk of tensors",
}


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def both(s: Score | None) -> str:
    """Geometric mean and 90th percentile."""
    return f"{percent(s.geomean)}, {percent(s.p90)}" if s is not None and s.n else ""


def family_rows(pack: Pack, result: AccuracyResult) -> Iterator[str]:
    passed, found = within_bars(result), samples(pack)
    yield "| family | law, before its correction | sweep | n | held out | largest | law alone | measured twice | bars |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in result.groups():
        m = result.metrics(name)
        family = name.removesuffix(GUESSED)
        draws = len({s.draw for s in found[family]})
        errors = (both(m.get(k)) for k in ("time", "time_extrapolated", "law", "repeated"))
        cells = [name, LAWS[family], f"{draws:,}", str(m["time"].n), *errors, "yes" if passed[name] else "no"]
        yield "| " + " | ".join(cells) + " |"


def engine_rows(result: AccuracyResult) -> Iterator[str]:
    """A line for every GPU and kernel that engines run: shapes that were not fitted."""
    found = {g: result.metrics(g) for g in result.groups()}
    for group in (g for g in found if not g.endswith((NEVER, BETWEEN))):
        m = found[group]
        some = [m["time"], *(found[group + part]["time"] for part in (NEVER, BETWEEN))]
        some += [m[k] for k in ("time_fitted", "time_over_20us", "kernel", "collectors")]
        t = m["time"]
        cells = [f"{t.n:,}", *(percent(x) for x in (t.geomean, t.median, t.p90)), *(percent(s.mape) for s in some)]
        yield "| " + " | ".join([group, *cells]) + " |"


def table_rows(result: AccuracyResult) -> Iterator[str]:
    """A line for every GPU and kernel of some tables."""
    for group in result.groups():
        m = result.metrics(group)
        long, name = m.get("time_over_20us"), group.removesuffix(" (transferred)")
        cells = [name, "no" if name != group else "yes", str(m["time"].n), both(m["time"])]
        cells += [str(long.n), both(long), f"{100 * long.bias:+.1f}%"] if long is not None else ["0", "", ""]
        yield "| " + " | ".join([*cells, both(m["law"])]) + " |"


ENGINES = (
    "| GPU and kernel | n | geomean | median | p90 | MAPE | widths never fitted | between fitted "
    "| fitted | over 20 us | kernel alone | collectors |"
)
TABLES = "| GPU and kernel | calibrated | n | all | n over 20 us | over 20 us | bias | law alone, all |"


def transfer(data: Path) -> list[str]:
    lines: list[str] = []
    skipped: list[str] = []
    for source, head, told in (("aiconfigurator", ENGINES, AS_RUN), ("neusight", TABLES, SINGLE)):
        lines += [told, head, "|---" * (head.count("|") - 1) + "|"]
        for path in sorted((data / "kernels" / source).glob("*.csv.gz")):
            if path.name.startswith("labels"):
                continue
            print(f"  {path.name}", file=sys.stderr)
            result = score_kernels([path])
            label = f" ({path.name.split('_')[0]})" if source == "neusight" else ""
            some = engine_rows(result) if source == "aiconfigurator" else table_rows(result)
            lines += [line.replace(" |", f"{label} |", 1) for line in some]
            skipped += [f"- {s.row}: {s.reason}" for s in result.skipped]
        lines.append("")
    return [*lines, "Left out:", "", *skipped, ""]


HEAD = """# Kernel models

This page is written by `make accuracy`. A kernel's time is a physical law times a learned correction: the law counts
bytes over bandwidth and FLOPs over rate on this GPU, the correction is boosted trees on the shape, fitted to a
calibration pack (`presage calibrate`, `presage pack`). Trees ship as plain arrays. One module a family, in
`src/presage/costs/families`.

## Held-out shapes of the H200 pack (`presage accuracy kernels data/h200_pack`)

Every family is fitted without a random fifth of its draws and without the 3% with the longest law, and scored on both,
with warm and with cold caches. A call that is scored is fitted nowhere. Errors are geometric mean and 90th percentile;
the bars are 5% and 20% on held-out shapes. `measured twice` is how far two measurements of one call differ: by chance
the sweep has drawn some calls more than once, mostly short ones.
"""

VIEWED = """Attention's shipped trees are of an earlier fit, over which corrections of published tables are fitted. The
rows held out were in view while rounds and leaves of convolutions were chosen (among three settings) and while laws by
launches were written for pools, resampling, norms, reductions and element-wise ops; the features of the tile that
cuDNN tells and the shrinking of leaves were chosen on a fifth of the fitted draws. On 2026-11-19, with the engine,
convolutions of less than 0.1 ms were 3.7% off (p90 17.3%), of 0.3 to 1 ms 3.7% (21.6%), of more than 1 ms 6.3% (37.6%);
depthwise 3-D ones of more than 0.3 ms 10.2% (46.6%).
"""

ASKED = """### Convolutions: cuDNN is asked

cuDNN has dozens of engines for a convolution, up to twenty times apart in time, and neighbouring sizes get other
ones. That choice was most of the error: with the engine known to the trees, the same rows are half as far off. cuDNN
makes the choice on the host and plans for a GPU that is only described to it (its "device properties"), so it can be
asked anywhere: no GPU, no driver, 0.5 ms a convolution (`presage.costs.cudnn`). It is asked in a process of its own,
as PyTorch asks it: the heuristics' instant mode, then the fallback list, for float32 without engines that round.
Checked against the sweeps of an H200: where nothing depends on the blocks that fit on a GPU at once, the workspace
that it tells is that which PyTorch's allocator was asked for, to the byte (forward 80 to 86%, data gradient 78 to
95%, weight gradient 62 to 70%). cuDNN 9.13, 9.19 and 9.20 chose alike in all of 3,832 convolutions. Not told: engines
of cuBLASLt, which take many pointwise convolutions; there the next engine is told, and trees fitted to measured times
make the best of it.

Its libraries come with a CUDA build of PyTorch on Linux, or with `pip install 'presage[cudnn]'` (0.8 GB).
`PRESAGE_CUDNN` names a folder with `libcudnn.so.9` and `libcublasLt.so`, or is `off`. Without them, and on GPUs that
are no Hoppers, the engine is guessed from the sizes (`conv, engine guessed` above, by trees of their own), and a note
says so where convolutions take a tenth of the GPU's time.
"""

OTHERS = """## Published tables, and GPUs that were never calibrated

`presage accuracy kernels TABLE.csv.gz`: bf16 GEMMs and causal prefill attention timed inside inference engines
(aiconfigurator), and float32 kernels of PyTorch 2.1 (NeuSight, its train and test tables). A GPU without a pack gets
the H200's corrections over its own law, and corrections of its own where tables timed its kernels.
"""

AS_RUN = """### aiconfigurator: ops as serving engines run them

A row is a kernel and what an engine adds. Both are modelled, apart (`python tools/fit_tables.py ../shared` writes
`src/presage/data/GPU/tables.npz`, 0.5 MB in all):

- **The kernel** (`kernel alone`; what `presage predict --gpu h100_sxm` uses): the GPU's law, the H200's correction, and
  trees for this GPU's sizes and waves. What engines add is taken off before they are fitted: the floor down to 2 us
  (3 us for attention) at the H200's clock, and the clock that falls under repeats of long kernels (8% to 15% for
  GEMMs beyond 4 ms, half of that for attention). Attention's rests on sequences from 2,048 tokens with at least
  four heads to one of keys, where the writing of a cache does not show; its backward is corrected like its forward.
  Float16 counts as bf16. PyTorch's flash kernels are not the fastest on Hopper and Blackwell and keep the H200's
  correction there.
- **The engine** (only where a table is scored): its floor, plus the kernel as hot as its collectors run it, times
  trees by shape and collector. A shape that several collectors timed counts once, with their median; predicted is the
  median of what those engines would take. Engines that are not known are taken as the middle of their framework.

Scored are shapes that were not fitted. Which these are is determined by the shape alone (`costs/split.py`), so in other
tables of the like too: by a hash a fifth of the pairs (n, k) of GEMMs and of the triples (batch, heads, key heads)
of attention is held out whole (`widths never fitted`, the harder split); of the others one shape in four is fitted on
(`fitted`), and the rest lies `between fitted` ones, as in a plain random split. The first figures are of both. The
settings of the trees are the same for all GPUs; they were chosen among six with an eye on such errors of four tables,
and moved them by a point or less but for one engine's windows on the B200.

From `MAPE` on columns are mean errors; `collectors` is how far those of one shape are from their median.
"""

SINGLE = """### neusight: float32 kernels of PyTorch 2.1

Geometric mean and 90th percentile. Inputs are taken to be in the cache, for one call is repeated, and the clock to be
the highest. A time lies between two events around a call, and holds what the host takes to issue it: 17 us for
element-wise ops, 26 for softmax, 50 for layer norm (`tools/fit_issue.py`: where the line of times over rows begins in
train tables, with no model of a kernel; 18, 27 and 37 in test tables). It is added to what is predicted, and to the
law.
"""

SHORT = """## What falls short, and the likely reasons (inferred from the tables, not measured)

- Engines: those that timed a shape differ by 4-8% in GEMMs and 15-25% in attention. One that is not in the tables
  gets their middle, and that much of an error.
- The L40S's GEMMs are worst, and its collectors agree least: its clock moves more under load.
- Heads wider than 256 have no fused kernel in PyTorch and are left out, though some engines have one.
- Attention on other GPUs than the H200: no table has backward, dropout, a bias or full attention; these are carried
  over.
- The power limit in `presage predict` is the H200's on every GPU: steps of an A100, B200 or L40S may run hotter.
- Float32 GEMMs: an SM of an H200 has twice the float32 lanes of one of an A100, V100 or P100 and seems to fill them
  less, so its corrections do not fit there: the law alone is nearer. L4 and T4, of 70 W, stay far below their peak.
  Trees fitted on train tables count by half on chips that are not in these (L4): with one GPU left out of the fit at a
  time, its train tables are 21.3% off by half of them, 22.3% by the law alone, 23.8% by all of them.
- Worse than the law alone by more than half a point: the T4's linear layers (test), by one. The T4 is in the fit, but
  its test table was measured at another clock: of layers over 10 ms the law is 11% too fast in its train table and 3%
  too slow in its test table.
- Layer norm reads a row twice. The second read is from L2 where the rows in flight (one to a block of 128 threads) fit
  there with what is written of them, else from memory: on an L4 always up to 9,000 columns, on an A100 up to 3,000, on
  a T4 up to 1,600, on V100 and P100 never but for the narrowest. No number is fitted.
- Softmax of PyTorch 2.1 reads rows wider than 1,024 three times and is bound by instructions (P100, V100, A100 20% to
  45% too fast); the kernel that was calibrated is a later one.
- Float32 convolutions: corrections of cuDNN's choice of kernels on an H200 do not carry over. On GPUs that are no
  Hoppers trees fitted on the tables of T4 and A100 stand in for them (`tools/fit_conv.py`; V100 and P100 are scored and
  not fitted); gradients, which no table has, follow the law alone. A T4 takes longer than its clock says: its power.
- Memory-bound kernels: a cache helps on another GPU only where it holds the bytes; the law alone is nearer elsewhere.
- AMD's products and convolutions follow the law alone: corrections of NVIDIA's libraries do not hold for AMD's.
"""


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    if not (data / "kernels").is_dir():
        sys.exit(f"no measured data at {data}: name the folder that holds kernels/")
    pack = read(PACK)
    result = score_pack(pack, lambda name: print(f"  {name}", file=sys.stderr))
    notes = [f"{n[0].upper()}{n[1:]}." for n in result.notes]
    parts = [HEAD, *family_rows(pack, result), "", *notes, VIEWED, ASKED, OTHERS]
    PAGE.write_text("\n".join([*parts, *transfer(data), SHORT]))
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


if __name__ == "__main__":
    main()
