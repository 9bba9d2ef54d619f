"""Index data: every format gives the same counts, skews come back, and bad files are told."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from commands import runner
from index_draws import draws
from presage.cli import indices as command
from presage.embeddings import embedding_model
from presage.embeddings.indices import Bags, count_lookups, likely_alpha, read_indices
from presage.errors import InputError, PresageError

run = runner(command.command)
SAMPLES = 4096


def bags() -> list[Bags]:
    """Three tables: uniform with bags alike, two skewed ones with bags that differ."""
    rng = np.random.default_rng(1)
    out = []
    for i, (alpha, rows, pooling) in enumerate(((0.0, 5000, 4), (0.8, 40_000, 6), (1.3, 200_000, 9))):
        lengths = np.full(SAMPLES, pooling) if alpha == 0 else rng.poisson(pooling, SAMPLES)
        out.append(Bags(str(i), draws(alpha, rows, int(lengths.sum()), i) - 1, lengths))
    return out


BAGS = bags()
INDICES = np.concatenate([b.indices for b in BAGS])
LENGTHS = np.stack([b.lengths for b in BAGS])
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS.reshape(-1))])


def same(found: list[Bags], wanted: list[Bags] = BAGS) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(np.array_equal(a.indices, b.indices) and np.array_equal(a.lengths, b.lengths) for a, b in pairs)


def test_numpy_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "joined.npz", indices=INDICES, lengths=LENGTHS, offsets=OFFSETS)
    assert same(read_indices(tmp_path / "joined.npz"))
    (tmp_path / "joined.npz.gz").write_bytes(gzip.compress((tmp_path / "joined.npz").read_bytes()))
    assert same(read_indices(tmp_path / "joined.npz.gz"))
    parts = {f"{b.name}.indices": b.indices for b in BAGS} | {f"{b.name}.lengths": b.lengths for b in BAGS}
    np.savez(tmp_path / "named.npz", **parts)
    assert same(read_indices(tmp_path / "named.npz"))
    for end in (None, -1):  # offsets with the end and without
        starts = {f"{b.name}.offsets": np.concatenate([[0], np.cumsum(b.lengths)])[:end] for b in BAGS}
        np.savez(tmp_path / "offsets.npz", **{f"{b.name}.indices": b.indices for b in BAGS}, **starts)
        assert same(read_indices(tmp_path / "offsets.npz"))
    np.savez(tmp_path / "arrays.npz", clicks=BAGS[0].indices.reshape(SAMPLES, 4))
    assert same(read_indices(tmp_path / "arrays.npz"), BAGS[:1])
    np.save(tmp_path / "columns.npy", BAGS[0].indices.reshape(SAMPLES, 4))
    found = read_indices(tmp_path / "columns.npy")
    assert [b.name for b in found] == [f"columns.{i}" for i in range(4)] and len(found[0].indices) == SAMPLES


def test_saved_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(a) for a in (INDICES, OFFSETS, LENGTHS)]
    torch.save(tuple(tensors), tmp_path / "three.pt")  # as facebookresearch/dlrm_datasets
    torch.save({"indices": tensors[0], "lengths": tensors[2]}, tmp_path / "dict.pt")
    torch.save([tensors[0], tensors[2]], tmp_path / "two.pt")
    for name in ("three", "dict", "two"):
        assert same(read_indices(tmp_path / f"{name}.pt"))


def test_code_in_a_saved_file_does_not_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Trap(), tmp_path / "trap.pt")
    np.save(tmp_path / "trap.npy", np.array([Trap()], object), allow_pickle=True)
    for name, said in (("trap.pt", "not plain tensors"), ("trap.npy", "holds Python objects")):
        with pytest.raises(InputError, match=said):
            read_indices(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="needs pyarrow"):
        read_indices(tmp_path / "t.parquet")
    monkeypatch.undo()
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lists = [np.split(b.indices, np.cumsum(b.lengths)[:-1]) for b in BAGS]
    columns = {b.name: arrow.array([x.tolist() for x in part]) for b, part in zip(BAGS, lists, strict=True)}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    assert same(read_indices(tmp_path / "t.parquet"))


def test_counts() -> None:
    found = list(count_lookups(BAGS, 1024))
    for c, b in zip(found, BAGS, strict=True):
        used = b.indices[: b.lengths[:1024].sum()]
        rows, uses = np.unique(used, return_counts=True)
        assert (c.lookups, c.distinct, c.top) == (len(used), len(rows), uses.max())
        assert c.pooling == b.lengths.mean() and c.rows == b.indices.max() + 1
        assert c.hist[1] == pytest.approx(((uses >= 2) & (uses < 4)).mean()) and sum(c.hist) == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.05, 1.3])
@pytest.mark.parametrize(("rows", "lookups"), [(2_000, 200_000), (300_000, 200_000)])
def test_skew_is_found(alpha: float, rows: int, lookups: int) -> None:
    """Where all rows are used too, when their number tells nothing; and of Zipf's own numbers."""
    one = Bags("t", draws(alpha, rows, lookups, 3) - 1, np.ones(lookups, int))
    assert next(count_lookups([one])).alpha == pytest.approx(alpha, abs=0.03)
    weight = np.arange(1, rows + 1.0) ** -alpha
    zipf = np.random.default_rng(5).choice(rows, lookups, p=weight / weight.sum())
    assert next(count_lookups([Bags("z", zipf, np.ones(lookups, int))])).alpha == pytest.approx(alpha, abs=0.12)


def test_no_lookups() -> None:
    empty = Bags("none", np.zeros(0, int), np.zeros(8, int))
    assert next(count_lookups([empty])).alpha == 0.0 and likely_alpha((0,) * 17, 0, 10) == 0.0


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "words.npz").write_bytes(b"words")
    np.savez(tmp_path / "short.npz", indices=INDICES, lengths=LENGTHS[:, :-1])
    np.savez(tmp_path / "alone.npz", indices=INDICES)
    np.save(tmp_path / "real.npy", np.ones((4, 2)))
    np.save(tmp_path / "minus.npy", np.full((4, 2), -1))
    for name, said in (
        ("words.npz", "is not a zip file"), ("short.npz", "lengths add up"), ("alone.npz", "neither lengths nor"),
        ("real.npy", "not of whole numbers"), ("minus.npy", "negative"), ("none.npy", "cannot be read"),
        ("x.csv", "should end in"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            read_indices(tmp_path / name)


def test_the_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", indices=INDICES, lengths=LENGTHS)
    value = json.loads(run(tmp_path / "t.npz", "--batch", "1024", "--dim", "64", "--dtype", "float16", "--json", "-"))
    assert value["batch"] == 1024 and value["samples"] == SAMPLES and len(value["tables"]) == 3
    keys = {"name", "rows", "dim", "pooling", "alpha", "hist", "distinct", "top", "lookups", "dtype"}
    assert keys == set(value["tables"][0]) and value["tables"][0]["dim"] == 64
    assert "alpha" in run(tmp_path / "t.npz")
    with pytest.raises(PresageError, match="dtype int3"):
        run(tmp_path / "t.npz", "--dtype", "int3")
    tables = [c.table() for c in count_lookups(BAGS, 1024)]
    assert embedding_model("h200").forward(tables, 1024) > 0
