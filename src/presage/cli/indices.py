"""`presage indices`: statistics of embedding lookups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from presage.cli.options import Json, option
from presage.cli.output import show_answer, status


def command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Index data: .npy, .npz, .pt or .parquet, also with .gz.")
    ],
    batch: Annotated[
        int | None, option("--batch", "N", "Count only the first N samples (default: all).", min=1)
    ] = None,
    dim: Annotated[int, option("--dim", "N", "Embedding dimension of the tables.", min=1)] = 128,
    dtype: Annotated[
        str, option("--dtype", "NAME", "Data type of the weights: float32, float16 or bfloat16.")
    ] = "float32",
    rows: Annotated[
        int | None, option("--rows", "N", "Rows of each table (default: its largest index + 1).", min=1)
    ] = None,
    json: Json = None,
) -> None:
    """Summarise the lookups of embedding tables: pooling factor, distinct rows, reuse, fitted skew.

    A file has indices with offsets or lengths of all tables (as dlrm_datasets does), or of each table by name, or
    arrays [samples, lookups]. `presage shard` reads the JSON.

    presage indices day_0.npz --batch 65536 --json tables.json
    """
    from presage.costs.lookups.table import WIDTHS
    from presage.embeddings.indices import count_lookups, read_indices
    from presage.errors import PresageError
    from presage.report.shard_answer import indices_answer

    if dtype not in WIDTHS:
        raise PresageError(f"--dtype {dtype}: choose from {', '.join(WIDTHS)}")
    with status("reading indices"):
        found = [bags for file in files for bags in read_indices(file)]
        samples = min((len(b.lengths) for b in found), default=0)
        used = min(samples, batch or samples)
        tables = list(count_lookups(found, used, dim, dtype, rows))
    show_answer(indices_answer(tables, used, samples), json)
