"""Score the kernel models on held-out shapes and on published tables, and write docs/kernels.md.

python docs/make_kernels.py ../shared
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from presage.accuracy.kernels import KernelResult, score_kernels, score_pack, within_bars
from presage.accuracy.score import Score
from presage.costs.fit import samples
from presage.costs.pack import Pack, read

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / "data" / "h200_pack"
PAGE = Path(__file__).with_name("kernels.md")

LAWS = {
    "gemm": "whole waves of tiles over the SMs at the FLOP rate of the type of number, or the three matrices' bytes",
    "conv": "as a matrix product in tiles, weight gradients split; or the bytes; plus changes of layout",
    "attention": "thread blocks walk over tiles, in waves; plus the bytes of queries and keys",
    "rnn": "steps one after the other: a wait and a small product each; plus the inputs' product",
    "pointwise": "distinct bytes read and bytes written",
    "copy": "bytes read and written",
    "reduce": "bytes read",
    "norm": "the activations twice read and once written (backward: three times); few channels leave SMs idle",
    "softmax": "bytes of the rows read and written",
    "embedding": "rows through cache and memory; gradients by a sort and partial sums, a chain for the commonest row",
    "index": "rows moved; added with atomics or in order, a chain for the commonest row",
    "sort": "radix passes, or one thread block a row",
    "pool": "time per byte, number and window of PyTorch's own kernels",
    "random": "bytes written",
    "optimizer": "bytes of all lists, and a launch for every so many tensors",
}


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def both(s: Score | None) -> str:
    """Geometric mean and 90th percentile."""
    return f"{percent(s.geomean)}, {percent(s.p90)}" if s is not None and s.n else ""


def family_rows(pack: Pack, result: KernelResult) -> Iterator[str]:
    passed, found = within_bars(result), samples(pack)
    yield "| family | law, before its correction | sweep | n | held out | largest | law alone | measured twice | bars |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in result.groups():
        m = result.metrics(name)
        draws = len({s.draw for s in found[name]})
        errors = (both(m.get(k)) for k in ("time", "time_extrapolated", "law", "repeated"))
        cells = [name, LAWS[name], f"{draws:,}", str(m["time"].n), *errors, "yes" if passed[name] else "no"]
        yield "| " + " | ".join(cells) + " |"


def table_rows(result: KernelResult) -> Iterator[str]:
    """A line for every GPU and kernel of some tables."""
    for group in result.groups():
        m = result.metrics(group)
        long, name = m.get("time_over_20us"), group.removesuffix(" (transferred)")
        spread = m.get("collectors")
        noise = percent(spread.geomean) if spread is not None and spread.n > 50 else ""
        cells = [name, "no" if name != group else "yes", str(m["time"].n), both(m["time"])]
        cells += [str(long.n), both(long), f"{100 * long.bias:+.1f}%"] if long is not None else ["0", "", ""]
        yield "| " + " | ".join([*cells, both(m["law"]), noise]) + " |"


TABLES = "| GPU and kernel | calibrated | n | all | n over 20 us | over 20 us | bias | law alone, all | collectors |"


def transfer(data: Path) -> list[str]:
    lines: list[str] = []
    skipped: list[str] = []
    for source in ("aiconfigurator", "neusight"):
        lines += [f"### {source}", "", TABLES, "|---|---|---|---|---|---|---|---|---|"]
        for path in sorted((data / "kernels" / source).glob("*.csv.gz")):
            if path.name.startswith("labels"):
                continue
            print(f"  {path.name}", file=sys.stderr)
            result = score_kernels([path])
            label = f" ({path.name.split('_')[0]})" if source == "neusight" else ""
            lines += [line.replace(" |", f"{label} |", 1) for line in table_rows(result)]
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
the bars are 5% and 15% on held-out shapes. `measured twice` is how far two measurements of one call differ: by chance
the sweep has drawn some calls more than once, mostly short ones.
"""

OTHERS = """## Published tables, and GPUs that were never calibrated

`presage accuracy kernels TABLE.csv.gz`: bf16 products and causal prefill attention timed inside inference engines
(aiconfigurator), and float32 kernels of PyTorch 2.1 (NeuSight, its train and test tables). None of it is fitted to. A
GPU without a pack gets the H200's corrections over its own law.

- A shape timed by several collectors counts once, with their median; `collectors` is their own distance from it.
- Engines add a floor of 2 to 10 us to a product and of 6 to 20 us to attention (the cache is written, plans are made).
  It is no kernel's time and not modelled: hence the rows over 20 us beside all rows.
- Attention under a sliding window is timed as without a mask over as many keys as the window has.
- Inputs are taken to be in the cache, for one call is repeated, and the clock to be the highest.
"""

SHORT = """## What falls short, and the likely reasons (inferred from the tables, not measured)

- Attention: the engines' kernels are not PyTorch's, and their paged cache costs most below a thousand tokens; their
  collectors differ by 11-19% themselves. Windows are worst. That other GPUs get the corrections of cuDNN's kernel and
  not of flash's was decided with the A100's and the L40S's tables in view.
- bf16 products: of its data-sheet peak an H200 reaches 0.72-0.76 in long products, an A100 0.77-0.79, a B200 0.62-0.66,
  an L40S 0.53-0.56; the law takes one share for all.
- Float32 products: an SM of an H200 has twice the float32 lanes of one of an A100, V100 or P100 and seems to fill them
  less, so its corrections do not fit there: the law alone is nearer. L4 and T4, of 70 W, stay far below their peak.
- Float32 convolutions: corrections of cuDNN's choice of kernels on an H200 do not carry over; the law alone is nearer.
- Layer norm on older GPUs: the correction looks at seconds, which on a slower GPU stand for other sizes.
"""


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    if not (data / "kernels").is_dir():
        sys.exit(f"no measured data at {data}: name the folder that holds kernels/")
    pack = read(PACK)
    result = score_pack(pack, lambda name: print(f"  {name}", file=sys.stderr))
    parts = [HEAD, *family_rows(pack, result), "", *(f"{n[0].upper()}{n[1:]}." for n in result.notes), "", OTHERS]
    PAGE.write_text("\n".join([*parts, *transfer(data), SHORT]))
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


if __name__ == "__main__":
    main()
