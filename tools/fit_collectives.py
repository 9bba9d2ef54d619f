"""Fit the collective model on tables of nccl-tests, and write what ships.

    python tools/fit_collectives.py ../shared/runs/nccl_busbw.csv

The tables are public and stay where they are: only the fitted parameters are written (docs/collectives.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

from presage.costs.collectives.model import SHIPPED
from presage_fit.collectives import fit, save_parameters
from presage_validation.collectives import read_rows


def main(paths: list[Path]) -> None:
    """Fit on all rows of all tables."""
    rows = [e.row for path in paths for e in read_rows(path)[0]]
    found = fit(rows)
    SHIPPED.parent.mkdir(parents=True, exist_ok=True)
    save_parameters(found, SHIPPED)
    print(f"{len(rows)} rows, {len(found.laws)} laws, {len(found.corrections.curves)} curves -> {SHIPPED}")


if __name__ == "__main__":
    main([Path(p) for p in sys.argv[1:]])
