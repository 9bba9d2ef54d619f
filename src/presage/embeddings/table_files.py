"""Tables and plans as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from presage.embeddings import Reuse, Table
from presage.embeddings.sharding_plan import PLACED, ShardingPlan, TablePlacement
from presage.errors import WRONG_VALUE, InputError, PresageError, near
from presage.files import write_whole
from presage.files.reading import read_json

MOST_TABLES = 100_000
KEYS = ("name", "rows", "dim", "pooling", "alpha", "hist", "lookups", "distinct", "top", "dtype", "count")
SEQUENCE = "sequence embeddings are not modelled: pooling is the mean number of lookups of a sample, which are summed"


def read_tables(path: str | Path) -> tuple[tuple[Table, ...], int | None]:
    """Tables of a JSON file written by `presage indices`, and the batch they were counted in, if given."""
    value = read_json(path)
    rows = value.get("tables") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows:
        raise InputError(path, "no list of tables in it", "tables")
    batch = value.get("batch") if isinstance(value, dict) else None
    if batch is not None and (not isinstance(batch, int) or batch < 1):
        raise InputError(path, f"is {batch!r}, not a number of samples", "batch")
    return tables_of(rows, path), batch


def tables_of(rows: Sequence[Any], path: str | Path) -> tuple[Table, ...]:
    """Tables from plain values: name, rows, dim, pooling, and alpha or a counted histogram. `count` repeats one."""
    out: list[Table] = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(path, "is not a table of values", f"tables[{i}]")
        unknown = next((key for key in row if key not in KEYS), None)
        if unknown is not None:
            raise InputError(path, f"is no value of a table{near(unknown, KEYS)}", f"tables[{i}].{unknown}")
        if str(row.get("pooling")).lower() == "none":
            raise InputError(path, SEQUENCE, f"tables[{i}].pooling")
        count = row.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_TABLES - len(out):
            raise InputError(path, f"is {count!r}: a number of tables, {MOST_TABLES:,} in all", f"tables[{i}].count")
        for k in range(count):
            name = str(row.get("name", i))
            out.append(_table(row, f"{name}.{k}" if count != 1 else name, path, i))
    names = [t.name for t in out]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InputError(path, f"two tables are called {twice!r}", "tables")
    return tuple(out)


def _table(row: Mapping[str, Any], name: str, path: str | Path, place: int) -> Table:
    try:
        reuse = Reuse(
            None if row.get("alpha") is None else float(row["alpha"]),
            tuple(float(x) for x in row.get("hist") or ()),
            lookups=float(row.get("lookups") or 0.0),
            distinct=float(row.get("distinct") or 0.0),
            top=float(row.get("top") or 0.0),
        )
        if reuse.alpha is None and not reuse.hist and not reuse.distinct:
            reuse = Reuse(alpha=0.0)
        return Table(
            name, int(row["rows"]), int(row["dim"]), float(row["pooling"]), reuse, str(row.get("dtype", "float32"))
        )
    except KeyError as e:
        raise InputError(path, "is missing", f"tables[{place}].{e.args[0]}") from None
    except WRONG_VALUE as e:
        raise InputError(path, str(e), f"tables[{place}]") from None


def plan_json(plan: ShardingPlan, tables: Sequence[Table]) -> dict[str, Any]:
    placed = {
        t.name: {"sharding": p.sharding, "ranks": list(p.ranks)} for t, p in zip(tables, plan.tables, strict=True)
    }
    return {"kind": "sharding plan", "ranks": plan.ranks, "tables": placed}


def save_plan(plan: ShardingPlan, tables: Sequence[Table], path: str | Path) -> None:
    write_whole(path, (json.dumps(plan_json(plan, tables), indent=1) + "\n").encode())


def read_plan(path: str | Path, tables: Sequence[Table]) -> ShardingPlan:
    """A plan for these tables, by their names."""
    value = read_json(path)
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("tables"), dict)
        or not isinstance(value.get("ranks"), int)
    ):
        raise InputError(path, 'is not a plan: {"ranks": N, "tables": {NAME: {"sharding", "ranks"}}}')
    names = [t.name for t in tables]
    unknown = [name for name in value["tables"] if name not in set(names)]
    if unknown:
        text = f"names a table that the job does not have: {unknown[0]!r}{near(unknown[0], names)}"
        raise InputError(path, text, "tables")
    out = []
    for t in tables:
        one = value["tables"].get(t.name)
        if not isinstance(one, dict):
            raise InputError(path, f"has no table {t.name!r}", "tables")
        kind, ranks = str(one.get("sharding")), one.get("ranks", [])
        if not isinstance(ranks, list) or not all(isinstance(r, int) for r in ranks):
            raise InputError(path, "is not a list of ranks", f"tables.{t.name}.ranks")
        out.append(TablePlacement(kind, tuple(ranks) if kind in PLACED else ()))
    try:
        return ShardingPlan(value["ranks"], tuple(out))
    except PresageError as e:
        raise InputError(path, str(e)) from None
