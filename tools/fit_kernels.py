"""Fit the kernel models of a GPU from its calibration pack.

    python tools/fit_kernels.py data/h200_pack src/presage/data/h200/kernels.npz [--only conv]

Takes a quarter of an hour, of which convolutions are most; cuDNN must be installed, for it tells their engines.
`presage predict --gpu FOLDER` does the same with a pack of your own and keeps the file there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.cudnn import libraries
from presage.costs.families import FAMILIES
from presage.costs.kernel_files import load_file, save
from presage_fit.kernel_models import fit_models
from presage_fit.pack import read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="families to fit; OUT keeps the others")
    args = parser.parse_args()
    if libraries() is None:
        sys.exit("cuDNN is not installed: pip install 'presage[cudnn]'")
    models = fit_models(read(args.pack), lambda name: print("fitting", name, flush=True), args.only or FAMILIES)
    if args.only:
        models = joined(load_file(args.out), models)
    save(models, args.out)
    rows = sum(models.source["rows"].values())
    print(
        f"{args.out}: {len(models.trees)} families from {rows:,} measured ops, {args.out.stat().st_size / 1e6:.1f} MB"
    )


def joined(old: CalibratedKernels, new: CalibratedKernels) -> CalibratedKernels:
    """The old models with the families that were fitted again."""
    source = {**old.source, **new.source, "rows": old.source["rows"] | new.source["rows"]}
    return replace(new, trees=old.trees | new.trees, counts=old.counts | new.counts, source=source)


if __name__ == "__main__":
    main()
