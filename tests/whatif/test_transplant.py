"""One run's host with another run's kernels: across regimes, against what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from presage.errors import PresageError
from presage.traces.replay import Replay, measured_steps, replay_of
from presage.traces.trace_set import read_run
from presage.whatif.replay_edits import kernels_of
from synthetic import Tracer


def replay(path: Path) -> Replay:
    return replay_of(read_run([path]))


def step_us(r: Replay) -> float:
    return r.steps(r.simulate(), 0)[-1].seconds * 1e6


def made(path: Path, kernel_us: float, name: str = "aten::mm") -> Path:
    """Ten ops every 50 us; kernels of a given length, one after another; a sync at the end."""
    t = Tracer()
    ends = max(520.0, 10 + 10 * (kernel_us + 2))
    t.step(0, 0, ends + 20)
    begins = 0.0
    for i in range(10):
        t.op(name, 50 * i, 45)
        begins = max(begins + kernel_us + 2 if i else 0.0, 50 * i + 10 + 6)
        t.launch("gemm", 50 * i + 10, begins, kernel_us)
    t.call("cudaDeviceSynchronize", 505, ends - 505 + 2)
    return t.write(path)


def test_a_host_bound_step_with_long_kernels_is_their_sum(tmp_path: Path) -> None:
    short, long = replay(made(tmp_path / "a.json", 5)), replay(made(tmp_path / "b.json", 200))
    changed, covered = kernels_of(short, long)
    assert covered == pytest.approx(1.0)
    assert step_us(changed) == pytest.approx(step_us(long), rel=0.02)
    assert step_us(changed) > 3 * step_us(short)


def test_another_step_is_refused(tmp_path: Path) -> None:
    one, other = replay(made(tmp_path / "a.json", 5)), replay(made(tmp_path / "b.json", 5, "aten::conv2d"))
    with pytest.raises(PresageError, match="same training step"):
        kernels_of(one, other)


@pytest.mark.parametrize(
    ("host_bound", "gpu_bound"),
    [
        ("resnet50_b64_amp_cl", "resnet50_b256_amp_cl"),
        ("gpt_350m_b1_s256_amp", "gpt_1.3b_b4_s2048_amp"),
        ("llama1b_b1_s2048_amp", "llama1b_b2_s4096_bf16"),
    ],
)
def test_from_the_host_bound_to_the_gpu_bound_regime(shared: Path, host_bound: str, gpu_bound: str) -> None:
    """The host's trace of a small batch with the kernels of a large one gives the large one's step within 2 %."""
    small, large = (replay(shared / "h200" / "traces" / f"{name}.json.gz") for name in (host_bound, gpu_bound))
    changed, _ = kernels_of(small, large)
    predicted = changed.steps(changed.simulate(), 0)[1].seconds
    assert predicted == pytest.approx(measured_steps(large, 0)[1].seconds, rel=0.02)
    assert predicted > 1.25 * measured_steps(small, 0)[1].seconds
