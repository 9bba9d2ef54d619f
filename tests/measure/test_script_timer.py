"""Timing a script's steps where it runs on a GPU, here with a clock in the place of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from presage.errors import PresageError
from presage.measure import __main__ as measure
from presage.measure import timing
from presage.measure.timing import WARM_UP, ScriptTimer, StopScript


class _Event:
    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = _Event.clock

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    nothing = lambda: None  # noqa: E731
    monkeypatch.setattr(timing, "start_profile", lambda _torch, _pack: lambda: "activity")
    cuda = SimpleNamespace(
        Event=_Event,
        synchronize=nothing,
        reset_peak_memory_stats=nothing,
        max_memory_allocated=lambda: 7,
        max_memory_reserved=lambda: 9,
    )
    return SimpleNamespace(cuda=cuda)


def steps(timer: ScriptTimer, seconds: Iterator[float]) -> None:
    """Steps back to back, each ending where the next begins."""
    for number, length in enumerate(seconds, 1):
        timer.begin(number)
        _Event.clock += length
        timer.end(number, 1)


def test_steps_are_timed_after_the_warm_up_and_the_profile_and_the_median_is_taken(torch: Any) -> None:
    timer = ScriptTimer(torch, 5)
    with pytest.raises(StopScript):
        steps(timer, iter([9.0] * WARM_UP + [8.0] * 3 + [1.0, 2.0, 50.0, 2.0, 2.0, 2.0, 2.0]))
    result = timer.timing()
    assert result.each == pytest.approx((1.0, 2.0, 50.0, 2.0, 2.0))
    assert result.seconds == pytest.approx(2.0), "a step with an evaluation does not count"
    assert (result.peak_allocated, result.peak_reserved) == (7, 9)
    assert timer.activity == "activity"


def test_a_script_that_swallows_the_end_is_ended_again(torch: Any) -> None:
    timer = ScriptTimer(torch, 1)
    with pytest.raises(StopScript):
        steps(timer, iter([1.0] * 40))
    with pytest.raises(StopScript):
        timer.begin(99)


def test_a_script_with_too_few_steps_is_told_how_many_it_needs(torch: Any) -> None:
    timer = ScriptTimer(torch, None)
    steps(timer, iter([1.0] * 14))
    with pytest.raises(PresageError, match="ended after 14 steps: measuring needs 16 or more"):
        timer.timing()


def test_the_command_line_names_scripts_as_predict_does() -> None:
    args = measure._arguments(["train.py", "--steps", "9", "--", "--lr", "1"])
    assert (args.script.argv, args.words, args.argv) == (("--lr", "1"), ["train.py"], ["--lr", "1"])
    args = measure._arguments(["-m", "package.train", "--step", "train_step", "--", "x=1"])
    assert args.words == ["-m", "package.train", "--step", "train_step"]
    assert args.values == {"argv": "x=1", "step": "train_step"}
    args = measure._arguments(["file.py:build", "--arg", "batch=8"])
    assert (args.script, args.words, args.values) == (None, ["file.py:build", "--arg", "batch=8"], {"batch": 8})
