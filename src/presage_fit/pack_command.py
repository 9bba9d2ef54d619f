"""`presage pack`: what is in a calibration pack, and several made into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.options import Json
from presage.cli.output import console, emit, print_brief, status

if TYPE_CHECKING:
    from presage_fit.pack import Pack


def command(
    packs: Annotated[list[Path], typer.Argument(metavar="PACK", help="Folders written by `presage calibrate`.")],
    merge_into: Annotated[
        Path | None,
        typer.Option(
            "--merge-into", metavar="DIR", help="Merge the packs into one compressed pack in this new folder."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Show what is in a calibration pack: GPU, software, date, and for each sweep its draws, errors and spread.

    Spread is the range of the repeats of one draw, relative to their median.

    With --merge-into, packs of the same GPU and software become one: all rows, repeated draws kept, and the newest of
    each small table. A single pack is checked and compressed.

    presage pack h200/

    presage pack monday/ tuesday/ --merge-into h200/
    """
    from presage_fit.pack import merge, read, write

    with status("reading packs"):
        found = [read(path) for path in packs]
        if merge_into is not None:
            found = [merge(found)]
            write(found[0], merge_into)
    if emit(json, lambda: {"kind": "pack", "packs": [_value(p) for p in found]}):
        _print(found, merge_into)


def _value(pack: Pack) -> dict[str, Any]:
    import msgspec

    from presage_fit.pack import spreads

    families = {}
    for name, rows in sorted(pack.families.items()):
        median, p90 = spreads(rows)
        families[name] = {
            "draws": len(rows),
            "errors": sum(r.error is not None for r in rows),
            "repeated": sum(r.repeat > 0 for r in rows),
            "ops": sum(len(r.ops) for r in rows),
            "spread_p50": median,
            "spread_p90": p90,
        }
    return {
        "folders": [str(f) for f in pack.folders],
        "header": msgspec.structs.asdict(pack.header),
        "families": families,
        "tables": sorted(pack.tables),
        "notes": list(pack.notes),
    }


def _print(found: list[Pack], merge_into: Path | None) -> None:
    from presage_fit.pack import error_table, family_table, origin_table

    out = console()
    for pack in found:
        draws = sum(len(rows) for rows in pack.families.values())
        print_brief(f"{pack.header.gpu}: {draws:,} draws of {len(pack.families)} families, measured {pack.header.date}")
        tables = [origin_table(pack), family_table(pack)]
        failed = any(r.error is not None for rows in pack.families.values() for r in rows)
        for table in [*tables, error_table(pack)] if failed else tables:
            out.print(table)
            out.print()
        for note in pack.notes:
            out.print(note, style="yellow", markup=False)
    if merge_into is not None:
        out.print(f"written: {merge_into}", markup=False)
