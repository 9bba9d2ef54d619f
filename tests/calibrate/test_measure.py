"""Measuring a step: what can be tested of it without a GPU, and that it needs nothing but torch and numpy."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import shell
from presage.errors import InputError, PresageError
from presage.graph import work as flops
from presage.graph.families import FAMILIES, family
from presage.measure import __main__ as command
from presage.measure import prediction
from presage.measure.activity import Activity, GpuWork, activity
from presage.measure.result import MeasureResult, page, to_json
from presage.measure.timing import Timing, quantile, timed

ROOT = Path(__file__).resolve().parents[2]
VARIED = ROOT / "data" / "h200_varied"

# What a bare machine lacks is not to be found, even where it is installed.
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "numba", "scipy", "typer", "rich", "click", "lightgbm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def bare(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A process with only Python, torch and numpy."""
    return subprocess.run([sys.executable, "-c", BARE + code, *argv], capture_output=True, text=True, cwd=ROOT)


def run_bare(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return bare(f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)", *argv)


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(VARIED / f"{name}.json.gz") as f:
        return json.load(f)["traceEvents"]


def measured(name: str) -> dict[str, Any]:
    return json.loads((VARIED / "measured.json").read_text())["cases"][name]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("presage.measure", "FILE.py:FUNCTION"),
        ("presage_fit.calibrate", "--minutes"),
        ("presage.calibrate", "--minutes"),
    ],
)
def test_help_on_a_bare_machine(module: str, said: str) -> None:
    found = run_bare(module, "--help")
    assert found.returncode == 0, found.stderr
    assert said in found.stdout and "Python, torch and numpy" in " ".join(found.stdout.split())


def test_the_blocking_blocks() -> None:
    assert "No module named 'msgspec'" in bare("import presage.graph.graph").stderr


def test_no_gpu_is_said_on_a_bare_machine() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = run_bare("presage.measure", "examples/gpt.py:build")
    assert (
        found.returncode == 2 and found.stderr.startswith("presage: no CUDA GPU on this machine") and not found.stdout
    )


def test_a_bare_machine_reads_what_the_profiler_recorded() -> None:
    code = """
import gzip, json
from presage.measure.activity import activity
with gzip.open("data/h200_varied/two_tower.json.gz") as f:
    found = activity(json.load(f)["traceEvents"], 2)
print(json.dumps({name: w.seconds for name, w in found.families.items()}))
"""
    found = bare(code)
    assert found.returncode == 0, found.stderr
    here = activity(recorded("two_tower"), 2)
    assert json.loads(found.stdout) == {name: w.seconds for name, w in here.families.items()}


@pytest.mark.parametrize("name", ["two_tower", "gqa_fp32", "conv2d", "hf_t5_amp"])
def test_activity_is_what_was_measured(name: str) -> None:
    found, told = activity(recorded(name), 2), measured(name)
    assert found.total.seconds == pytest.approx(told["gpu_active_ms"] / 1e3, rel=1e-6)
    assert found.total.kernels == told["kernels"]
    assert sum(w.seconds for w in found.families.values()) == pytest.approx(found.total.seconds)
    assert set(found.families) <= set(FAMILIES) and found.families.get("other", GpuWork(0, 0)).seconds == 0
    assert list(found.families.values()) == sorted(found.families.values(), key=lambda w: -w.seconds)


def test_kernels_count_for_their_leaf_op() -> None:
    events = [
        {"cat": "cpu_op", "name": "aten::linear", "args": {"External id": 1}},
        {"cat": "cpu_op", "name": "aten::addmm", "args": {"External id": 2}},
        {"cat": "kernel", "name": "gemm", "dur": 30.0, "args": {"External id": 2}},
        {"cat": "gpu_memset", "name": "Memset (Device)", "dur": 2.0, "args": {"External id": 2}},
        {"cat": "kernel", "name": "triton_add", "dur": 5.0, "args": {}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 3.0, "args": {"External id": 99}},
        {"ph": "M", "name": "process_name"},
    ]
    found = activity(events, 1)
    assert found.families == {
        "matrix multiply": GpuWork(pytest.approx(32e-6), 2),
        "other": GpuWork(pytest.approx(8e-6), 2),
    }
    assert found.total == GpuWork(pytest.approx(40e-6), 4)


def test_every_op_with_flops_is_of_a_family_that_multiplies() -> None:
    wanted = {"matrix multiply", "convolution", "attention", "recurrent"}
    assert {family(name) for name in flops._RULES} == wanted


class FakeCuda:
    """Counts what a GPU would be asked; an event's time is the number of steps run so far, in ms."""

    def __init__(self) -> None:
        self.steps, self.peak_reset_at = 0, -1

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=-1)
        event.record = lambda: setattr(event, "at", self.steps)
        event.elapsed_time = lambda other: float(other.at - event.at)
        return event

    def reset_peak_memory_stats(self) -> None:
        self.peak_reset_at = self.steps

    def synchronize(self) -> None: ...

    def get_device_name(self) -> str:
        return "NVIDIA H200"

    def max_memory_allocated(self) -> int:
        return 3 << 30

    def max_memory_reserved(self) -> int:
        return 4 << 30


def fake_torch() -> Any:
    backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    return SimpleNamespace(
        cuda=FakeCuda(), backends=backends, __version__="2.11.0+cu130", version=SimpleNamespace(cuda="13.0")
    )


def test_timing_warms_up_and_counts() -> None:
    torch = fake_torch()

    def step() -> None:
        torch.cuda.steps += 1

    found, same = timed(torch, lambda: step, steps=7)
    assert same is step and torch.cuda.steps == 10 + 7 and torch.cuda.peak_reset_at == 0
    assert found.each == pytest.approx((1e-3,) * 7) and 0 <= found.issued <= found.seconds
    assert (found.peak_allocated, found.peak_reserved) == (3 << 30, 4 << 30)
    torch.cuda.steps = 0
    assert len(timed(torch, lambda: step)[0].each) == 400 and torch.cuda.steps == 410  # 2.5 s, but no more than that


def test_quantiles() -> None:
    assert [quantile((3.0, 1.0, 2.0), q) for q in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 3.0]
    assert quantile((5.0,), 0.95) == 5.0


PREDICTED = {
    "step_ms": {"mean": 11.0, "p5": 10.5, "p50": 11.0, "p95": 12.0},
    "gpu_active_ms": 8.8,
    "peak_memory_bytes": 3 << 30,
    "breakdown": {"matrix multiply": {"ms": 6.0, "share": 0.75}, "random": {"ms": 0.5, "share": 0.05}},
}


def result(**more: Any) -> MeasureResult:
    families = {"matrix multiply": GpuWork(6e-3, 20), "elementwise": GpuWork(2e-3, 80)}
    timing = Timing(10e-3, (50e-3, *(1e-3 * (9 + k / 10) for k in range(21))), 4e-3, 3 << 30, 4 << 30)
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": 91900}
    return MeasureResult(
        "train.py:build", {"batch": 8}, machine, timing, Activity(GpuWork(8e-3, 100), families), **more
    )


def test_the_page_has_measured_beside_predicted() -> None:
    text = page(result(prediction=prediction.from_json(PREDICTED)))
    rows = [line.split() for line in text.splitlines()]
    assert text.startswith("train.py:build (batch=8) on NVIDIA H200, torch 2.11.0+cu130\n")
    assert ["step", "10", "ms", "11", "ms", "+10.0%"] in rows
    assert ["p50", "10", "ms", "11", "ms", "+10.0%"] in rows  # the first step of 50 ms is left out
    assert ["GPU", "active", "8", "ms", "8.8", "ms", "+10.0%"] in rows
    assert ["of", "the", "step", "80.0%"] in rows
    assert ["peak", "allocated", "3", "GiB", "3", "GiB", "+0.0%"] in rows
    assert ["matrix", "multiply", "20", "6", "ms", "75.0%", "6", "ms", "+0.0%"] in rows
    assert ["elementwise", "80", "2", "ms", "25.0%", "0", "-100.0%"] in rows
    assert ["random", "0", "0", "0.0%", "500", "us", "-"] in rows


def test_the_page_without_a_prediction_says_why() -> None:
    text = page(result(no_prediction="not predicted: no pack"))
    assert text.endswith("not predicted: no pack")
    assert ["step", "10", "ms", "-", "-"] in [line.split() for line in text.splitlines()]


def test_json_has_the_keys_of_predict() -> None:
    value = to_json(result(prediction=prediction.from_json(PREDICTED)))
    assert value["step_ms"] == pytest.approx({"mean": 10.0, "p5": 9.1, "p50": 10.0, "p95": 10.9})
    assert value["breakdown"]["elementwise"] == pytest.approx({"ms": 2.0, "share": 0.25, "kernels": 80})
    told = value["prediction"]
    assert told["error"] == pytest.approx({"step": 0.1, "gpu_active": 0.1, "peak_memory": 0.0})
    again = prediction.from_json(value)  # what was measured can be read as if it were predicted
    assert again.step["mean"] == pytest.approx(10e-3) and again.families["matrix multiply"] == pytest.approx(6e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "no step_ms in it"),
        ('{"step_ms": 3}', "no step_ms in it"),
        ('{"step_ms": {"mean": "3"}}', "mean is '3', not a number"),
        ('{"step_ms": {}, "breakdown": {"x": 1}}', "breakdown should be an object of objects"),
    ],
)
def test_predictions_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pred.json"
    path.write_text(text)
    with pytest.raises(InputError) as e:
        prediction.read(path)
    assert said in str(e.value) and str(path) in str(e.value)


def test_its_own_prediction_is_asked_in_a_process_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = f"import sys, os, json; p = {PREDICTED!r}; p['gpu_active_ms'] = len(sys.argv); "
    monkeypatch.setattr(
        prediction, "CALL", echo + "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''; print(json.dumps(p))"
    )
    found = prediction.predict(["train.py:build", "--arg", "batch=8"], [], "h200")
    assert found.gpu_active == pytest.approx(9e-3)  # -c predict train.py:build --arg batch=8 --gpu h200 --json -
    monkeypatch.setattr(prediction, "CALL", "import sys; sys.exit('presage: no pack of this GPU')")
    with pytest.raises(PresageError, match=r"^no pack of this GPU$"):
        prediction.predict(["train.py:build"], [], "h200")


STEP = """
def build(device, batch=4, broken=False):
    print("building on", device)
    if broken:
        return batch
    return lambda: None
def fails(device):
    return lambda: 1 / 0
"""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "cuda_torch", lambda *_: fake_torch())
    monkeypatch.setattr(command, "profiled", lambda *_: activity(recorded("two_tower"), 2))
    return tmp_path


def test_the_command(on_a_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (on_a_gpu / "pred.json").write_text(json.dumps(PREDICTED))
    command.main(["train.py:build", "--arg", "batch=8", "--steps", "5", "--predicted", "pred.json", "--json", "-"])
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert "building on cuda" in said.err
    assert (value["arguments"], value["steps"], value["gpu"]) == ({"batch": 8}, 5, "NVIDIA H200")
    assert value["gpu_active_ms"] == pytest.approx(measured("two_tower")["gpu_active_ms"])
    command.main(["train.py:build", "--steps", "5", "--no-predict", "--json", "out.json"])
    assert "train.py:build on NVIDIA H200" in capsys.readouterr().out
    assert json.loads((on_a_gpu / "out.json").read_text())["no_prediction"] == ""


def test_the_command_predicts_by_itself(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    told = prediction.from_json(PREDICTED)
    monkeypatch.setattr(command, "predict", lambda *a: asked.append(a) or told)
    command.main(["train.py:build", "--arg", "batch=8", "--steps", "5"])
    assert asked == [(["train.py:build", "--arg", "batch=8"], [], "h200", None)] and "11 ms" in capsys.readouterr().out
    monkeypatch.setattr(command, "can_predict", lambda: False)
    command.main(["train.py:build", "--steps", "5"])
    assert "not predicted: presage is only partly installed here" in capsys.readouterr().out
    assert (on_a_gpu / "train.py").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train.py:build", "--arg", "broken=true"], "it must return a callable that runs one step, not 4"),
        (["train.py:fails"], r"train\.py:8: ZeroDivisionError: division by zero"),
        (["train.py:build", "--arg", "size=1"], r"TypeError: build\(\) got an unexpected keyword argument 'size'"),
        (["train.py:absent"], r"train\.py: no function 'absent' in it; it has build, fails"),
        (["train.py"], "the script ended after 0 steps"),
        (["absent.py:build"], r"absent\.py: cannot be read: there is no such file"),
        (["train.py:build", "--arg", "batch"], "--arg batch: should be NAME=VALUE"),
        (["train.py:build", "--predicted", "absent.json"], r"absent\.json: cannot be read: there is no such file"),
    ],
)
@pytest.mark.usefixtures("on_a_gpu")
def test_mistakes_are_told(argv: list[str], said: str) -> None:
    with pytest.raises(PresageError, match=said):
        command.main([*argv, "--no-predict", "--steps", "2"])


def test_wrong_options_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        command.main(["train.py:build", "--steps", "0"])
    assert e.value.code == 2 and "should be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["measure", "calibrate"])
def test_the_command_line_passes_options_on(name: str) -> None:
    found = shell(name, "--help")
    assert found.returncode == 0 and f"usage: presage {name}" in found.stdout
    wrong = shell(name, "--bogus")
    assert wrong.returncode == 2 and f"presage {name}: error" in wrong.stderr
