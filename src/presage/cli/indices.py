"""`presage indices`: what index data tells of embedding tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from presage.cli.options import Json
from presage.cli.output import console, emit, print_brief, status


def command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Index data: .npy, .npz, .pt, .parquet, or those with .gz.")
    ],
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Count in the first so many samples. [default: all]")
    ] = None,
    dim: Annotated[int, typer.Option("--dim", min=1, help="Columns of the tables, which indices do not tell.")] = 128,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Type of the weights: float32, float16 or bfloat16.")
    ] = "float32",
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows of each table. [default: its largest index and one]")
    ] = None,
    json: Json = None,
) -> None:
    """What index data tells of embedding tables: pooling, distinct rows, how often rows are used, the skew that fits.

    A file has indices with offsets or lengths of all tables (as dlrm_datasets), or of each by name, or arrays [samples,
    lookups]. The JSON is what `presage shard` takes.

    presage indices day_0.npz --batch 65536 --json tables.json
    """
    from dataclasses import asdict

    from presage.embeddings.index_counts import count
    from presage.embeddings.index_files import read_indices
    from presage.embeddings.table import WIDTHS
    from presage.errors import PresageError
    from presage.report.embedding_tables import counted_table

    if dtype not in WIDTHS:
        raise PresageError(f"dtype {dtype!r}: there is {', '.join(WIDTHS)}")
    with status("reading indices"):
        found = [bags for file in files for bags in read_indices(file)]
        samples = min((len(b.lengths) for b in found), default=0)
        used = min(samples, batch or samples)
        tables = list(count(found, used, dim, dtype, rows))
    value = {"kind": "tables", "batch": used, "samples": samples, "tables": [asdict(t) for t in tables]}
    if emit(json, value):
        print_brief(f"{len(tables)} tables, {used:,} of {samples:,} samples counted")
        console().print(counted_table(tables, used))
