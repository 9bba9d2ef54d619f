"""Whatever a file holds, its reader gives a value or one sentence, soon; the same seed spoils files in the same way."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from fuzz.attempt import attempt, inputs
from fuzz.readers import BY_NAME, READERS, Reader, with_torch

INPUTS = 60  # of each reader; `make fuzz` tries many more


def share(reader: Reader) -> int:
    """Of how many inputs one is handed to the command as well."""
    return 60 if reader.slow else 30


@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.name)
def test_spoiled_files(reader: Reader, tmp_path: Path) -> None:
    accepted = 0
    for i, files in islice(inputs(reader, seed=0), INPUTS):
        found = attempt(reader, files, tmp_path / "in", command=i % share(reader) == 0)
        assert not found.crash, f"input {i} of {reader.name}: {found.crash}"
        assert found.accepted or i >= len(reader.files), f"a sound file was refused: {found.said}"
        accepted += found.accepted
    assert 0 < accepted < INPUTS, "some files are still sound, and some are not"


def test_spoiled_tensors(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tensors are saved by torch")
    reader = with_torch()
    for i, files in islice(inputs(reader, seed=0), 40):
        found = attempt(reader, files, tmp_path / "in")
        assert not found.crash, f"input {i}: {found.crash}"


def test_the_same_seed_spoils_alike_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(seed: int) -> list[dict[str, bytes]]:
        return [files for r in READERS for _, files in islice(inputs(r, seed), 10)]

    first = some(3)
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: 2e9)
        assert first == some(3) != some(4)


def test_a_broken_reader_is_found(tmp_path: Path) -> None:
    """The contract can be broken: by another exception, by many lines, by a file left behind."""

    def breaks(path: Path) -> None:
        if b"c" in path.read_bytes():
            raise KeyError("c")

    def writes(path: Path) -> None:
        path.with_name("more").write_text("")

    for read in (breaks, writes):
        reader = Reader("broken", read, ({"a": b"a b c"},), {"a": "text"}, "a")
        found = [attempt(reader, files, tmp_path / "in") for _, files in islice(inputs(reader, 0), 20)]
        assert any(f.crash for f in found)


MENDED = {
    "Kineto trace": [b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"traceEvents":[]}'],
    "collectives": [b"gpu,nodes,n_gpus,op,bytes,time_us\nh100,0.5,8,all_reduce,8,9\n",
                    b"gpu,nodes,n_gpus,op,bytes,time_us\nh"],
    "kernel times": [b"device,dtype,m,n,k,latency_ms\nNVIDIA H200,bfloat16,inf,nan,1,1\n"],
    "embedding tables": [b'{"tables": [{"name": "a", "rows": Infinity, "dim": 1, "pooling": 1}]}',
                         b'{"tables": [{"rows": 9, "dim": 1, "pooling": 1, "count": 9223372036854775807}]}'],
    "embedding groups": [b'{"groups": [], "repeats": [3, {"id": 0}], "calls": 5}'],
    "table of steps": [b"step,seconds\n100000000000000000000000000000,0.5\n"],
    "speeds of GPUs": [b"gpu,time\na,1e-320\nb,1e308\n"],
    "measured pairs": [b'{"a/b": {"edit": "a", "base": {"step_ms": 1, "gpu_active_ms": 1, "peak_bytes": 1},'
                       b' "changed": {"step_ms": 0, "gpu_active_ms": 1, "peak_bytes": 1}}}'],
    "prediction": [b'{"step_ms": {"mean": 1}, "peak_memory_bytes": Infinity}'],
    "user's code": [b"CASES = {'one': len}\ndef build(device): pass\n"],
}  # fmt: skip


@pytest.mark.parametrize("name", MENDED)
def test_what_once_broke_a_reader(name: str, tmp_path: Path) -> None:
    reader = BY_NAME[name]
    for data in MENDED[name]:
        assert not attempt(reader, {reader.target: data}, tmp_path / "in").crash


def test_a_run_that_claims_a_trillion_ranks_names_a_few_of_those_missing(tmp_path: Path) -> None:
    reader = BY_NAME["folder of traces"]
    files = dict(reader.files[0])
    first = json.loads(files["0.json"])
    first["distributedInfo"]["world_size"] = 10**12
    found = attempt(reader, files | {"0.json": json.dumps(first).encode()}, tmp_path / "in")
    assert not found.crash and "rank 2, 3, 4, 5, 6, 7, 8, 9 ... of 1000000000000 missing" in found.said


def test_half_a_character_in_json_is_named(tmp_path: Path) -> None:
    reader = BY_NAME["Hugging Face config"]
    config = reader.files[0]["config.json"].replace(b'"silu"', b'"\\ud800"')
    assert b"ud800" in config
    found = attempt(reader, reader.files[0] | {"config.json": config}, tmp_path / "in")
    assert not found.crash and "half of a character" in found.said


def test_a_shell_script_cannot_grow_without_end(tmp_path: Path) -> None:
    from presage.configs.script_arguments import read_script
    from presage.errors import InputError

    doubling = "A=xxxxxxxx\n" + 'A="$A$A"\n' * 60
    laughs = "a: &a0 [1, 1]\n" + "".join(f"b{i}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60))
    for name, text in (("a.sh", doubling), ("a.yaml", laughs), ("b.yaml", "a: &a [*a]"), ("c.yaml", "[" * 5000)):
        if name.endswith("yaml"):
            pytest.importorskip("yaml")
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=name):
            read_script(tmp_path / name)


@pytest.mark.parametrize(
    "opened", ["A=$((" + "(" * 3000, 'A="$((' * 500, "<<x\n" * 3000, "${A:-" * 3000, "--a " * 20000]
)
def test_scripts_are_read_in_a_moment(tmp_path: Path, opened: str) -> None:
    """No pattern goes back over the text again and again."""
    import time

    from presage.configs.script_arguments import read_script

    (tmp_path / "a.sh").write_text(opened)
    start = time.process_time()
    read_script(tmp_path / "a.sh")
    assert time.process_time() - start < 2


def test_texts_from_files_cannot_drive_the_terminal(tmp_path: Path) -> None:
    from presage.errors import InputError

    said = str(InputError(tmp_path / "a", 'is "\x1b[2J\nx\ud800" ' + "y" * 5000, "f\n"))
    assert said.isprintable() and len(said) < 2000


def test_gzip_is_known_by_its_first_bytes_not_its_name(tmp_path: Path) -> None:
    from presage.files.reading import read_text

    (tmp_path / "a.toml").write_bytes(gzip.compress(b"\xef\xbb\xbfa = 1\r\n"))
    assert read_text(tmp_path / "a.toml") == "a = 1\n"
