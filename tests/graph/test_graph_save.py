"""Saved graphs come back equal; a bad file is one clear sentence."""

from __future__ import annotations

import gzip
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from graph_sketches import training_step
from presage.errors import InputError, PresageError
from presage.graph import save
from presage.graph.graph import Graph, Tensor

FUZZ = settings(suppress_health_check=list(HealthCheck))
SAMPLE = training_step()
DATA = save.to_bytes(SAMPLE)
INSIDE = msgspec.msgpack.encode(SAMPLE)
HEAD = b"presage graph 1\n"


def packed(inside: bytes) -> bytes:
    return HEAD + gzip.compress(inside, 1, mtime=0)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "step.presage"
    save.write(SAMPLE, path)
    assert save.read(path) == SAMPLE
    assert save.is_saved(path)
    assert not save.is_saved(tmp_path / "none")
    assert path.read_bytes() == DATA, "the same graph gives the same file"


scalars = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(max_size=9), st.none()
)
arguments = st.one_of(scalars, st.lists(st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=3))


@FUZZ
@given(st.lists(arguments, max_size=5), st.text(max_size=20), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_any_argument_survives(values: list[Any], line: str, given_arguments: dict[str, str]) -> None:
    first = replace(SAMPLE.ops[0], inputs=(*SAMPLE.ops[0].inputs, *values), line=line)
    graph = replace(SAMPLE, ops=(first, *SAMPLE.ops[1:]), arguments=given_arguments, notes=(line,))
    again = save.from_bytes(save.to_bytes(graph))
    assert again == graph
    assert repr(again) == repr(graph), "1, 1.0 and True stay what they are"


def test_infinities_survive() -> None:
    first = replace(SAMPLE.ops[0], inputs=(*SAMPLE.ops[0].inputs, math.inf, -math.inf, math.nan))
    again = save.from_bytes(save.to_bytes(replace(SAMPLE, ops=(first, *SAMPLE.ops[1:]))))
    assert repr(again.ops[0].inputs[-3:]) == "(inf, -inf, nan)"


def test_texts_of_another_kind_become_text() -> None:
    class Version(str):
        pass

    assert save.from_bytes(save.to_bytes(replace(SAMPLE, torch=Version("2.13")))).torch == "2.13"
    with pytest.raises(PresageError, match="holds a object"):
        save.to_bytes(replace(SAMPLE, torch=object()))


def wide(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=(10**6,) * 3, strides=(10**12, 10**6, 1))


def with_field(**changes: Any) -> bytes:
    return packed(msgspec.msgpack.encode(msgspec.to_builtins(SAMPLE) | changes))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a saved graph"),
        (b"PK\x03\x04 a zip", "is not a saved graph"),
        (b"presage graph x\n", "is not a saved graph"),
        (b"presage graph 7\n" + DATA[len(HEAD) :], "version: is 7, newer than this presage reads (1): update it"),
        (b"presage graph 0\n", "version: is 0"),
        (HEAD, "is cut short"),
        (DATA[: len(DATA) // 2], "is cut short"),
        (HEAD + b"not gzip", "is damaged"),
        (packed(b"\xc1"), "is damaged"),
        (packed(b""), "is damaged"),
        (packed(INSIDE[:-9]), "is damaged"),
        (packed(msgspec.msgpack.encode([1])), "expected `object`, got `array`"),
        (packed(msgspec.msgpack.encode({"ops": []})), "object missing required field `tensors`"),
        (with_field(ops=[{"name": 5}]), "ops[0].name: expected `str`, got `int`"),
        (with_field(tensors=[]), "ops[0].inputs: names a tensor that is not there"),
        (with_field(tensors=[wide(t) for t in SAMPLE.tensors]), "tensors[0]: is larger than 1 PiB, as no step is"),
        (with_field(storages=[replace(s, nbytes=2**62) for s in SAMPLE.storages]), "storages: is larger than 1 PiB"),
        (with_field(events=[[0, 99, True]]), "events[0].storage: names storage 99 of"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "bad.presage"
    path.write_bytes(data)
    with pytest.raises(InputError) as e:
        save.read(path)
    assert str(e.value).startswith(f"{path}: {said}")
    assert "\n" not in str(e.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        save.read(tmp_path / "none.presage")
    with pytest.raises(PresageError, match="cannot be written"):
        save.write(SAMPLE, tmp_path / "no" / "folder.presage")


def test_a_small_file_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MOST", 1 << 20)
    with pytest.raises(InputError, match="holds more than"):
        save.from_bytes(packed(bytes(1 << 22)))


def attempt(data: bytes) -> None:
    try:
        assert isinstance(save.from_bytes(data, "x.presage"), Graph)
    except InputError as e:
        assert str(e).startswith("x.presage: ")
        assert "\n" not in str(e)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(DATA)
    for at, value in changes:
        data[at] = value
    attempt(bytes(data))


@FUZZ
@given(
    st.lists(st.tuples(st.integers(0, len(INSIDE) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(INSIDE)),
    st.integers(0, 30),
    st.binary(max_size=12),
)
def test_changed_bytes_inside(changes: list[tuple[int, int]], at: int, gone: int, put: bytes) -> None:
    data = bytearray(INSIDE)
    for place, value in changes:
        data[place] = value
    attempt(packed(bytes(data[:at] + put + data[at + gone :])))


def test_ten_thousand_ops_are_small_and_fast() -> None:
    graph = training_step(layers=1667)
    assert len(graph.ops) >= 10_000
    began = time.process_time()
    data = save.to_bytes(graph)
    assert len(data) < 400_000
    assert save.from_bytes(data) == graph
    assert time.process_time() - began < 5
