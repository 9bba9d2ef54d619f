"""Calibration packs: read, checked, merged, compressed, shown."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.errors import InputError, PresageError
from presage_fit import pack

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "h200_pack"
HEADER = {
    "presage_pack": 2, "gpu": "NVIDIA Made-Up", "sms": 100, "memory_bytes": 1 << 36, "l2_bytes": 1 << 25,
    "power_limit_W": 500.0, "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900, "driver": "580", "host": "a CPU",
    "python": "3.12.3", "date": "2026-01-02", "repeats": 4,
}  # fmt: skip


def line(m: int, us: float = 10.0, **more: Any) -> dict[str, Any]:
    op = {
        "op": "aten::mm", "dims": [[m, 8], [8, 8]], "types": ["float", "float"], "strides": [[8, 1], [8, 1]],
        "concrete": ["", ""], "us": us, "spread_us": 0.5, "n": 4, "kernels": [["gemm", us]],
    }  # fmt: skip
    return {"p": {"m": m}, "mhz": 1980, "ops": [op | more]}


def made(folder: Path, lines: list[Any], tables: dict[str, Any] | None = None, **header: Any) -> Path:
    folder.mkdir()
    (folder / "header.json").write_text(json.dumps(HEADER | header))
    (folder / "gemm.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for name, value in (tables or {}).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_rows_come_in_seconds(tmp_path: Path) -> None:
    path = made(
        tmp_path / "p", [line(3, 10.0, cold_us=12.0), {"p": {"m": 4}, "error": "RuntimeError: no"}, line(3, 11.0)]
    )
    found = pack.read(path)
    first, failed, again = found.rows("gemm")
    (op,) = first.ops
    assert (op.seconds, op.cold, op.spread, op.n) == pytest.approx((10e-6, 12e-6, 0.5e-6, 4))
    assert op.kernels == (("gemm", pytest.approx(10e-6)),) and op.dims == [[3, 8], [8, 8]]
    assert (first.params, first.mhz, first.error, first.repeat) == ({"m": 3}, 1980, None, 0)
    assert (failed.ops, failed.error) == ((), "RuntimeError: no")
    assert again.repeat == 1 and again.ops[0].cold is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"p": {"m": 1}, "ops": [{"op": "aten', "gemm.jsonl: line 2: not valid JSON"),
        ("", "gemm.jsonl: line 2: not valid JSON"),
        ('{"ops": []}', "gemm.jsonl: line 2: Object missing required field `p`"),
        ('{"p": {}}', "gemm.jsonl: line 2: a draw has either ops or an error"),
        ('{"p": {}, "ops": [], "error": "x"}', "gemm.jsonl: line 2: a draw has either ops or an error"),
        (json.dumps(line(1, -1.0)), "gemm.jsonl: line 2: Expected `float` >= 0.0"),
        (json.dumps(line(1, n=0)), "gemm.jsonl: line 2: Expected `int` >= 1"),
        (json.dumps(line(1, us="10")), "line 2: Expected `float`, got `str` - at `$.ops[0].us`"),
        (json.dumps(line(1, kernels=[["gemm"]])), "line 2: Expected `array` of length 2"),
        ("\udcff", "line 2: not valid JSON"),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = made(tmp_path / "p", [line(1)])
    with (path / "gemm.jsonl").open("ab") as f:
        f.write(text.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(InputError) as e:
        pack.read(path)
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"presage_pack": 3}, "header.json: presage_pack: is 3; this presage reads versions 1 and 2"),
        ({"presage_pack": None}, "header.json: presage_pack: is None"),
        ({"sms": 0}, "header.json: Expected `int` >= 1 - at `$.sms`"),
        ({"gpu": ""}, "`$.gpu`"),
        ({"date": "yesterday"}, "`$.date`"),
        ({"memory_bytes": "80GB"}, "`$.memory_bytes`"),
    ],
)
def test_a_bad_header_is_told_with_its_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = made(tmp_path / "p", [], **change)
    with pytest.raises(InputError) as e:
        pack.read(path)
    assert said in str(e.value)


def test_folders_that_are_no_packs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        pack.read(tmp_path / "absent")
    with pytest.raises(InputError, match=r"no header\.json in it"):
        pack.read(tmp_path)
    path = made(tmp_path / "p", [line(1)])
    (path / "gemm.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match=r"both gemm\.jsonl and gemm\.jsonl\.gz: keep one"):
        pack.read(path)
    (path / "gemm.jsonl.gz").unlink()
    (path / "host.json").write_text("[1,")
    with pytest.raises(InputError, match=r"host\.json: not valid JSON"):
        pack.read(path)
    (path / "host.json").unlink()
    (path / "notes.txt").write_text("")
    assert pack.read(path).notes == (f"{path / 'notes.txt'} is no part of a pack",)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    found = pack.read(made(tmp_path / "p", [line(1)]))
    with pytest.raises(PresageError, match="no family 'conv' in this pack; it has gemm"):
        found.rows("conv")
    with pytest.raises(InputError, match=r"power\.json: not in this pack"):
        found.table("power")


def test_merging_keeps_every_row_and_the_newest_tables(tmp_path: Path) -> None:
    old = made(tmp_path / "old", [line(1, 10.0), line(2)], {"host": [1], "power": [1]}, date="2026-01-01")
    new = made(tmp_path / "new", [line(1, 11.0)], {"host": [2]}, date="2026-02-01", host="another CPU")
    both = pack.merge([pack.read(new), pack.read(old)])
    rows = list(both.rows("gemm"))
    assert [(r.params["m"], r.repeat, round(r.ops[0].seconds * 1e6)) for r in rows] == [
        (1, 0, 11),
        (1, 1, 10),
        (2, 0, 10),
    ]
    assert both.tables == {"host": [2], "power": [1]} and both.header.date == "2026-02-01"
    assert both.notes == (f"{old / 'host'}.json is left out for that of {new}",)
    assert [part["host"] for part in both.header.parts] == ["another CPU", "a CPU"]
    pack.write(both, tmp_path / "out")
    again = pack.read(tmp_path / "out")
    assert (again.header, again.families, again.tables) == (both.header, both.families, both.tables)


@pytest.mark.parametrize("field", ["gpu", "sms", "torch", "cuda", "cudnn"])
def test_packs_of_other_gpus_or_software_are_not_merged(tmp_path: Path, field: str) -> None:
    one = pack.read(made(tmp_path / "one", []))
    other = pack.read(made(tmp_path / "other", [], **{field: 7 if field in ("sms", "cudnn") else "7"}))
    with pytest.raises(InputError, match=rf"header\.json: {field}: is 7, but .* cannot be merged"):
        pack.merge([one, other])
    with pytest.raises(PresageError, match="given twice"):
        pack.merge([one, one])


def test_compact_is_deterministic_and_changes_no_line(tmp_path: Path) -> None:
    path = made(tmp_path / "p", [line(m) for m in range(50)], {"host": [{"us": 1.5}]})
    for out in ("a", "b"):
        pack.compact(path, tmp_path / out)
    names = sorted(f.name for f in (tmp_path / "a").iterdir())
    assert names == ["gemm.jsonl.gz", "header.json", "host.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "gemm.jsonl.gz").read_bytes()[4:8] == bytes(4)  # gzip's time stamp
    assert gzip.decompress((tmp_path / "a" / "gemm.jsonl.gz").read_bytes()) == (path / "gemm.jsonl").read_bytes()
    with pytest.raises(PresageError, match="is there already"):
        pack.compact(path, tmp_path / "a")


def test_a_last_line_without_its_end_does_not_run_into_the_next_pack(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", [line(1)]), made(tmp_path / "two", [line(2)])
    (one / "gemm.jsonl").write_text(json.dumps(line(1)))
    pack.write(pack.merge([pack.read(one), pack.read(two)]), tmp_path / "out")
    assert [r.params["m"] for r in pack.read(tmp_path / "out").rows("gemm")] == [1, 2]


@pytest.mark.slow
def test_the_shipped_packs_can_be_read() -> None:
    found = [pack.read(folder) for folder in sorted(SHIPPED.iterdir()) if (folder / "header.json").exists()]
    if (SHIPPED / "header.json").exists():
        found.append(pack.read(SHIPPED))
    assert found
    for one in found:
        assert one.header.gpu == "NVIDIA H200" and one.header.sms == 132
        assert sum(len(rows) for rows in one.families.values()) > 1000
        assert not one.notes
        assert all(op.seconds > 0 for rows in one.families.values() for r in rows for op in r.ops)


def test_the_command_shows_and_merges(tmp_path: Path) -> None:
    one = made(tmp_path / "one", [line(1), {"p": {}, "error": "RuntimeError: [no]"}], {"host": []})
    two = made(tmp_path / "two", [line(1), line(2)], {"host": []})
    shown = CliRunner().invoke(app, ["pack", str(one)])
    assert shown.exit_code == 0
    assert (
        "NVIDIA Made-Up, 100 SMs" in shown.stdout and "500 W" in shown.stdout and "RuntimeError: [no]" in shown.stdout
    )
    assert ["gemm", "2", "1", "0", "1", "10", "us", "10", "us", "5.0%", "5.0%"] in map(
        str.split, shown.stdout.splitlines()
    )
    out = tmp_path / "out"
    merged = CliRunner().invoke(app, ["pack", str(one), str(two), "--merge-into", str(out), "--json", "-"])
    (value,) = json.loads(merged.stdout)["packs"]
    assert value["families"]["gemm"] | {"spread_p50": 0, "spread_p90": 0} == {
        "draws": 4, "errors": 1, "repeated": 1, "ops": 3, "spread_p50": 0, "spread_p90": 0
    }  # fmt: skip
    assert len(value["notes"]) == 1 and (out / "gemm.jsonl.gz").exists()
