"""Fit the kernel models of a GPU from its calibration pack.

    python tools/fit_kernels.py data/h200_pack src/presage/data/h200/kernels.npz

Takes a minute or two. `presage predict --gpu FOLDER` does the same with a pack of your own and keeps the file there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from presage.costs.kernel_files import save
from presage_fit.kernel_models import fit_models
from presage_fit.pack import read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    models = fit_models(read(args.pack), lambda name: print("fitting", name, flush=True))
    save(models, args.out)
    rows = sum(models.source["rows"].values())
    print(
        f"{args.out}: {len(models.trees)} families from {rows:,} measured ops, {args.out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
