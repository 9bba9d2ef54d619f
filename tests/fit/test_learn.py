"""Kernel corrections learned from traces: what they do to the step they are from, to others, and bad input."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.costs.kernel_files import VERSION, load, write_arrays
from presage.costs.learned_files import LEARNED, check_pack, read_learned
from presage.costs.learned_kernels import EFFECTS, CallTable, LearnedCorrection, covariance
from presage.errors import InputError, PresageError
from presage.files.arrays import read_npz
from presage.files.reading import DATA
from presage.prediction.machine import machine
from presage.traces.trace_graph import trace_graphs
from presage_fit.calibrate.__main__ import main
from presage_fit.learn import LearnedPack, common_gpu, graph_calls, learn, learn_pack

TRACE = DATA / "dlrm_mlperf_b2048.json.gz"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> LearnedPack:
    """The H200's trace, as if that GPU were not listed: over the models of an H100."""
    return learn_pack([TRACE], tmp_path_factory.mktemp("packs") / "pack", like="h100_sxm")


def test_the_step_it_was_learned_from_takes_what_it_took(pack: LearnedPack) -> None:
    (traced,) = pack.traces
    assert traced.predicted / traced.seconds > 1.15  # an H100 has less bandwidth
    assert traced.corrected(pack.correction) == pytest.approx(traced.seconds, rel=0.02)
    times = machine(pack.out).kernels.op_times(trace_graphs(TRACE)[0])
    assert sum(t.seconds for t in times) == pytest.approx(traced.seconds, rel=0.03)


def test_bandwidth_carries_over_to_families_that_were_not_measured(pack: LearnedPack) -> None:
    """A softmax moves bytes as copies do: it gets most of what they show of the bandwidth, 4.8 over 3.35 TB/s."""
    table = one_call("softmax", "aten::_softmax float32", bandwidth=1.0)
    factor = float(np.exp(pack.correction.mean(table))[0])
    assert 0.65 < factor < 0.9
    bound = one_call("gemm", "aten::mm bfloat16", arithmetic=1.0)
    assert float(np.exp(pack.correction.mean(bound))[0]) == pytest.approx(1.0, abs=0.12)


def test_a_family_without_a_sample_has_a_wider_range(pack: LearnedPack) -> None:
    known = pack.correction.calls.part(np.array([0]))
    unknown = one_call("attention", "aten::_cudnn_attention_forward bfloat16", arithmetic=1.0)
    share = np.ones(1)
    assert pack.correction.error(unknown, share) > 3 * pack.correction.error(known, share)
    assert "attention" in pack.correction.unknown_families
    assert any("attention" in note and "wider" in note for note in read_learned(pack.out).notes)


def test_few_samples_leave_a_correction_near_one() -> None:
    """Corrections grow with the number of samples towards what these show, and ranges shrink."""
    means, errors = [], []
    for count in (1, 4, 16):
        calls = many_calls(count)
        found = LearnedCorrection(calls, calls.seconds * 1.3)
        other = one_call("norm", "aten::native_layer_norm float32", bandwidth=0.5)
        means.append(float(found.mean(other)[0]))
        errors.append(found.error(other, np.ones(1)))
    assert 0.0 < means[0] < means[1] < means[2] < np.log(1.3)
    assert errors[0] > errors[1] > errors[2]


def test_effects_are_a_covariance() -> None:
    table = graph_calls(trace_graphs(TRACE)[0], load("h100_sxm"), "trace", "NVIDIA H200").calls.table
    assert np.linalg.eigvalsh(covariance(table, table, EFFECTS)).min() > -1e-9


def test_models_of_the_gpu_itself_are_believed_more() -> None:
    """On a calibrated GPU one trace changes other calls less."""
    traced = graph_calls(trace_graphs(TRACE)[0], load("h100_sxm"), "trace", "NVIDIA H200")
    other = one_call("softmax", "aten::_softmax float32", bandwidth=1.0)
    plain, certain = (abs(float(learn([traced], scale).mean(other)[0])) for scale in (1.0, 0.25))
    assert certain < plain


def test_a_pack_is_predicted_with(pack: LearnedPack) -> None:
    found = machine(pack.out)
    assert found.kernels.gpu.name == "NVIDIA H200 SXM 141 GB"
    graph = trace_graphs(TRACE)[0]
    assert found.spread(graph).kernels < machine("h100_sxm").spread(graph).kernels


def test_a_trace_with_few_ops_tells_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pack predicts with the host that is assumed, as a GPU without a pack does."""
    monkeypatch.setattr("presage.traces.overhead_factors.LEAST_SAMPLES", 10**9)
    found = learn_pack([TRACE], tmp_path / "pack")
    assert [p.name for p in found.out.iterdir()] == [LEARNED]
    assert machine(found.out).host.assumed


def test_a_folder_of_traces(pack: LearnedPack, tmp_path: Path) -> None:
    """As torch.profiler.tensorboard_trace_handler writes it; what is no profiler's trace is passed over."""
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "worker0.1.pt.trace.json.gz").write_bytes(TRACE.read_bytes())
    (folder / "args.json").write_text("{}")
    found = learn_pack([folder], tmp_path / "pack")
    assert [Path(t.path).name for t in found.traces] == ["worker0.1.pt.trace.json.gz"]
    assert found.correction.measured.tolist() == pack.correction.measured.tolist()
    (folder / "worker0.1.pt.trace.json.gz").unlink()
    with pytest.raises(InputError, match="no Kineto trace"):
        learn_pack([folder], tmp_path / "other")


# ---- bad input


def test_a_trace_without_shapes(tmp_path: Path) -> None:
    data = json.loads(gzip.decompress(TRACE.read_bytes()))
    for event in data["traceEvents"]:
        for name in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
            event.get("args", {}).pop(name, None)
    bare = tmp_path / "bare.json.gz"
    bare.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(InputError, match="was recorded without shapes"):
        learn_pack([bare], tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_a_trace_of_another_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a trace of NVIDIA H200, not of NVIDIA A100 SXM 80 GB"):
        learn_pack([TRACE], tmp_path / "pack", "a100")
    renamed = tmp_path / "other.json.gz"
    text = gzip.decompress(TRACE.read_bytes()).replace(b"NVIDIA H200", b"Someone's GPU")
    renamed.write_bytes(gzip.compress(text))
    with pytest.raises(InputError, match=r"is of Someone's GPU, and .* of NVIDIA H200"):
        learn_pack([TRACE, renamed], tmp_path / "pack")
    with pytest.raises(InputError, match=r"which is not listed: say which it is .*--like h100_sxm"):
        learn_pack([renamed], tmp_path / "pack")
    assert common_gpu([renamed], None, "h100") == ("Someone's GPU", "h100_sxm")


def test_a_folder_is_not_added_to(pack: LearnedPack) -> None:
    before = (pack.out / LEARNED).read_bytes()
    with pytest.raises(PresageError, match="is there already; name a new folder"):
        learn_pack([TRACE], pack.out)
    assert (pack.out / LEARNED).read_bytes() == before
    with pytest.raises(PresageError, match="one trace is given twice"):
        learn_pack([TRACE, TRACE], pack.out.with_name("twice"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": VERSION + 1}, r"version \d+, this presage reads"),
        ({"base": "0"}, "another version of presage: learn it again"),
        ({"family": ["gemm"]}, "is damaged"),
        ({"gpu": 3}, "not a pack learned from traces, or a damaged one"),
    ],
)
def test_a_damaged_pack(pack: LearnedPack, tmp_path: Path, change: dict[str, object], problem: str) -> None:
    arrays = read_npz(pack.out / LEARNED)
    about = json.loads(arrays.pop("about").tobytes()) | change
    write_arrays(tmp_path / LEARNED, arrays, about)
    with pytest.raises(InputError, match=problem):
        read_learned(tmp_path)


def test_a_cut_off_pack(pack: LearnedPack, tmp_path: Path) -> None:
    (tmp_path / LEARNED).write_bytes((pack.out / LEARNED).read_bytes()[:1000])
    with pytest.raises(InputError):
        read_learned(tmp_path)


def test_a_pack_of_another_gpu(pack: LearnedPack, tmp_path: Path) -> None:
    check_pack(pack.out, "h200")
    with pytest.raises(InputError, match="is of NVIDIA H200, not of NVIDIA A100 SXM 80 GB: leave NVIDIA A100"):
        check_pack(pack.out, "a100")
    with pytest.raises(InputError, match="is of NVIDIA H200, not of NVIDIA H100 SXM 80 GB"):  # begun from it only
        check_pack(pack.out, "h100_sxm")
    with pytest.raises(InputError, match="no such folder; a pack is"):
        check_pack(tmp_path / "none", None)


def test_options_of_traces_go_with_traces(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match="go with --from TRACE"):
        main(["--out", str(tmp_path / "pack"), "--like", "h100"])


# ---- calls


def one_call(family: str, op: str, bandwidth: float = 0.0, arithmetic: float = 0.0) -> CallTable:
    each = (np.array([x]) for x in (1e-4, bandwidth, arithmetic, 0.0))
    return CallTable((family,), (op,), np.array([7]), *each)


def many_calls(count: int) -> CallTable:
    sizes = np.geomspace(1e-4, 1e-2, count)
    table = one_call("copy", "aten::copy_ float32", bandwidth=1.0).part(np.zeros(count, np.int64))
    return replace(table, call=np.arange(count), seconds=sizes, op=tuple(f"aten::op{i} float32" for i in range(count)))
