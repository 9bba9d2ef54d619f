"""Whatever bytes come, the reader gives a Trace or one InputError; what it gives can be replayed or is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from presage.errors import InputError, PresageError
from presage.traces import kineto
from presage.traces.replay import replay_of
from presage.traces.run import run_of
from synthetic import Tracer

FUZZ = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def sample() -> bytes:
    t = Tracer(0, 2)
    t.step(0, 0, 100)
    t.op("aten::linear", 10, 50, **{"Input Dims": [[2, 3], []], "Sequence number": 3})
    t.launch("gemm", 30, 45, 20)
    t.kernel("ncclDevKernel_AllReduce", 70, 10, t.call("cudaLaunchKernelExC", 55, 3), stream=20)
    t.call("cudaStreamSynchronize", 60, 30)
    t.op("MulBackward0", 65, 8, tid=2, **{"Sequence number": 3})
    return t.text()


SAMPLE = sample()


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        trace = kineto.read(path)
    except InputError as e:
        assert "\n" not in str(e)
        return
    try:
        timeline = replay_of(run_of([trace])).simulate()
        assert (timeline.wait >= 0).all()
    except PresageError:
        pass


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for at, value in changes:
        data[at] = value
    check(tmp_path_factory.getbasetemp() / "changed.json", bytes(data))


@FUZZ
@given(st.integers(0, len(SAMPLE)), st.integers(0, 40), st.binary(max_size=12))
def test_cut_and_spliced(tmp_path_factory: pytest.TempPathFactory, at: int, gone: int, put: bytes) -> None:
    check(tmp_path_factory.getbasetemp() / "spliced.json", SAMPLE[:at] + put + SAMPLE[at + gone :])


@FUZZ
@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_gzip(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    data = bytearray(gzip.compress(SAMPLE, mtime=0))
    data[at % len(data)] = value
    check(tmp_path_factory.getbasetemp() / "damaged.json.gz", bytes(data))


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4), st.none(), st.booleans())


@FUZZ
@given(st.dictionaries(st.sampled_from(["ts", "dur", "tid", "pid", "cat", "name", "ph"]), NUMBERS, min_size=1))
def test_fields_of_other_types(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]) -> None:
    t = Tracer()
    t.launch("gemm", 30, 45, 20)
    t.events[0] |= fields
    check(tmp_path_factory.getbasetemp() / "fields.json", t.text())


@FUZZ
@given(
    st.dictionaries(st.sampled_from(["correlation", "stream", "device", "bytes", "Input Dims"]), NUMBERS, min_size=1)
)
def test_arguments_of_other_types(tmp_path_factory: pytest.TempPathFactory, args: dict[str, object]) -> None:
    t = Tracer()
    t.launch("gemm", 30, 45, 20)
    t.events[1]["args"] |= args
    check(tmp_path_factory.getbasetemp() / "arguments.json", t.text())
