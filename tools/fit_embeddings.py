"""Fit the embedding model on measured groups of tables, and write what ships.

    python tools/fit_embeddings.py ../shared/h200/tbe_groups.json

The measurements stay where they are: only fitted parameters are written (docs/embeddings.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

from presage.costs.lookups.lookup_model import SHIPPED
from presage_fit.embeddings import fit_lookups, save_lookup_parameters
from presage_validation.embeddings import read_groups


def main(path: Path) -> None:
    """Fit on all groups of a file."""
    found = read_groups(path)
    source = f"{len(found.groups)} groups of tables on {found.chip.name} ({path.name})"
    save_lookup_parameters(fit_lookups(found.groups, source), SHIPPED)
    print(f"{source} -> {SHIPPED}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
