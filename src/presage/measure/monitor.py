"""Predicted against measured while a training loop runs: step time, memory, and where the difference comes from.

    with presage.watch("prediction.json", out="run.json") as watch:
        for batch in watch(loader):
            train_step(batch)

Needs Python, and torch where a GPU is used. On a GPU steps are timed by CUDA events, and two early steps are profiled
to learn how long the GPU computes in a step; with several ranks their figures are gathered when the loop ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.measure.activity import new_profile, read_activity
from presage.measure.comparison import LoopTiming, RankTiming, RunComparison
from presage.measure.prediction import Prediction, from_json, read
from presage.measure.saved_pack import PackRecorder

WARM_UP = 5  # steps that are not timed
PROFILED = 2  # steps under the profiler, right after the warm-up
WINDOW = 50  # steps of a live figure
SLOW = 0.10  # slower than predicted by this share: worth a warning
Log = Callable[[Mapping[str, float], int], None]


class StepMonitor:
    """Times the steps of a training loop and compares them with a prediction; `presage.watch` is this class.

    `predicted`: a file that `presage predict --json` wrote, a result of `presage.predict` or `presage.predict_job`, or
    seconds per step. `out`: a JSON file for `presage compare`. `every`: steps between two lines on stderr. `log`:
    "tensorboard", "wandb", "mlflow", or a function of (metrics, step). `save_pack`: a new folder for a pack of this
    GPU's kernels, learned from the profiled steps when the loop ends (`presage predict --pack`). Used as a context
    manager, or by the callbacks through begin(), end() and finish().
    """

    def __init__(
        self,
        predicted: Any = None,
        *,
        out: str | Path | None = None,
        every: int = WINDOW,
        log: str | Log | None = None,
        profile: bool = True,
        quiet: bool = False,
        save_pack: str | Path | None = None,
    ) -> None:
        if save_pack is not None and not profile:
            raise PresageError("save_pack learns from profiled steps: leave out profile=False")
        self.prediction = _prediction(predicted)
        self.pack = PackRecorder(Path(save_pack)) if save_pack is not None and _rank() == 0 else None
        self.out, self.every, self.quiet = out, max(every, 1), quiet
        self.log = _logger(log)
        self.steps = 0  # complete, warm-up included
        self._timing = LoopTiming()
        self._clock = _CudaClock(profile, self.pack) if _cuda() is not None else _HostClock()
        self._waited = 0.0
        self._last_end: float | None = None
        self._warned = False
        self.result: RunComparison | None = None

    # ---- the loop

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; the body of the loop is the step."""
        for batch in batches:
            self.begin()
            yield batch
            self.end()

    def begin(self) -> None:
        """A step begins: its batch is here."""
        now = time.perf_counter()
        self._waited = 0.0 if self._last_end is None else now - self._last_end
        if self._last_end is None:
            self._clock.start()

    def end(self) -> None:
        """A step has ended (on the host: the GPU may still be at work)."""
        self._last_end = time.perf_counter()
        self.steps += 1
        self._clock.mark(self.steps)
        if self.steps > WARM_UP and self._clock.counts(self.steps):
            self._timing.waits.append(self._waited)
        if self.steps > WARM_UP and self.steps % self.every == 0:
            self._report()

    def __enter__(self) -> StepMonitor:
        return self

    def __exit__(self, *failure: Any) -> None:
        failed = failure[0] is not None
        with suppress(Exception) if failed else nullcontext():
            self.finish(gather=not failed)

    def finish(self, gather: bool = True) -> RunComparison:
        """The comparison over all timed steps; written to `out`, and printed. `gather`: with the figures of other
        ranks, which all have to call this: not where one of them has failed."""
        self._collect()
        ranks = _gathered(self._timing) if gather else ()
        self.result = RunComparison(self.prediction, self._timing, ranks)
        if _rank() == 0:
            if self.out is not None:
                write_whole(self.out, (json.dumps(self.result.to_json(), indent=2) + "\n").encode())
            if not self.quiet and self._timing.steps:
                print(f"presage: {self.result.headline}", file=sys.stderr)
            self._save_pack()
        return self.result

    def _save_pack(self) -> None:
        if self.pack is not None:
            saved, self.pack = self.pack.save(), None
            print(f"presage: {saved.line}", file=sys.stderr)

    # ---- live figures

    @property
    def metrics(self) -> dict[str, float]:
        """The latest figures, by name: for loggers."""
        self._collect()
        return RunComparison(self.prediction, self._timing.latest(self.every)).metrics

    def _collect(self) -> None:
        steps, self._timing.gpu_active, self._timing.peak_memory = self._clock.read()
        self._timing.steps.extend(steps)

    def _report(self) -> None:
        self._collect()
        latest = RunComparison(self.prediction, self._timing.latest(self.every))
        if not latest.measured.steps or _rank() != 0:
            return
        self.log(latest.metrics, self.steps)
        if not self.quiet:
            print(f"presage: step {self.steps:,}: {latest.headline}", file=sys.stderr)
        slower = latest.error
        if slower is not None and slower > SLOW and not self._warned and not self.quiet:
            self._warned = True
            print(f"presage: warning: {100 * slower:.0f}% slower than predicted; {latest.advice}", file=sys.stderr)


watch = StepMonitor


class _HostClock:
    """Step times by the host's clock: right where a step waits for its own result, as on a CPU."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.pending: list[float] = []

    def start(self) -> None:
        self.last = time.perf_counter()

    def counts(self, _step: int) -> bool:
        return True

    def mark(self, step: int) -> None:
        now = time.perf_counter()
        if step > WARM_UP:
            self.pending.append(now - self.last)
        self.last = now

    def read(self) -> tuple[list[float], float | None, int | None]:
        steps, self.pending = self.pending, []
        return steps, None, None


class _CudaClock:
    """Step times from one step's end to the next on the GPU; the steps after the warm-up are profiled, not timed."""

    def __init__(self, profile: bool, pack: PackRecorder | None = None) -> None:
        self.torch: Any = _cuda()
        self.pack = pack
        self.profiled = PROFILED if profile else 0
        self.profiler: Any = None
        self.active: float | None = None
        self.events: list[Any] = []

    def counts(self, _step: int) -> bool:
        return _step > WARM_UP + self.profiled + 1

    def start(self) -> None:
        self.torch.cuda.reset_peak_memory_stats()

    def mark(self, step: int) -> None:
        if self.profiled and step == WARM_UP:
            self._start_profiler()
        elif self.profiler is not None and step >= WARM_UP + self.profiled:
            self._stop_profiler()
        if step > WARM_UP + self.profiled:
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)

    def read(self) -> tuple[list[float], float | None, int | None]:
        done = [e for e in self.events if e.query()]
        steps = [1e-3 * a.elapsed_time(b) for a, b in pairwise(done)]
        self.events = self.events[max(len(done) - 1, 0) :]
        return steps, self.active, int(self.torch.cuda.max_memory_allocated())

    def _start_profiler(self) -> None:
        self.torch.cuda.synchronize()
        self.profiler = new_profile(self.pack)
        with suppress(RuntimeError):  # another profiler is at work
            self.profiler.start()
            return
        self.profiler = None

    def _stop_profiler(self) -> None:
        self.torch.cuda.synchronize()
        self.profiler.stop()
        found = read_activity(self.profiler, self.profiled, self.pack)
        self.active, self.profiler = found.total.seconds, None


def _cuda() -> Any:
    """torch, where this process can use a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


# ---- ranks


def _distributed() -> Any:
    torch = sys.modules.get("torch")
    dist = torch.distributed if torch is not None and torch.distributed.is_available() else None
    return dist if dist is not None and dist.is_initialized() else None


def _rank() -> int:
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def _gathered(timing: LoopTiming) -> tuple[RankTiming, ...]:
    """Figures of every rank; empty for one process."""
    dist = _distributed()
    if dist is None or dist.get_world_size() == 1:
        return ()
    own = RankTiming(int(dist.get_rank()), timing.step, timing.wait, timing.gpu_active)
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, own)
    return tuple(out)


# ---- what is predicted, and where figures go


def _prediction(given: Any) -> Prediction:
    if given is None:
        return Prediction()
    if isinstance(given, int | float):
        return Prediction({"mean": float(given), "p50": float(given)})
    if isinstance(given, str | Path):
        return read(given)
    value = given if isinstance(given, Mapping) else given.to_json()
    try:
        return from_json(dict(value))
    except ValueError as e:
        raise PresageError(f"not a prediction of presage: {e}") from e


def _logger(given: str | Log | None) -> Log:
    """A function of (metrics, step); a name opens that library's writer."""
    if callable(given):
        return given
    if given is not None and given not in LOGGERS:
        raise PresageError(f"log={given!r}: choose from {', '.join(LOGGERS)}, or give a function of (metrics, step)")
    try:
        return loggers([] if given is None else [given])
    except ImportError as e:
        raise PresageError(f"log={given!r} needs a package that is not installed here: {e}") from e


def loggers(names: Iterable[str]) -> Log:
    """A function of (metrics, step) that logs to those of the named libraries that are known."""
    writers = [LOGGERS[name]() for name in names if name in LOGGERS]

    def log(metrics: Mapping[str, float], step: int) -> None:
        for write in writers:
            write(metrics, step)

    return log


def _tensorboard() -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter()

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb() -> Log:
    import wandb

    return lambda metrics, step: wandb.log(dict(metrics), step=step) if wandb.run is not None else None


def _mlflow() -> Log:
    import mlflow

    return lambda metrics, step: mlflow.log_metrics({k.replace("/", "."): v for k, v in metrics.items()}, step=step)


LOGGERS: dict[str, Callable[[], Log]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


# ---- Callbacks for Hugging Face's Trainer and for Lightning: predicted against measured step time and memory, live.


def trainer_callback(predicted: Any = None, **options: Any) -> Any:
    """A callback for transformers.Trainer; options as for `presage.watch`."""
    try:
        from transformers import TrainerCallback
    except ImportError as e:
        raise PresageError("the Trainer callback needs transformers: pip install transformers") from e

    class PresageTrainerCallback(TrainerCallback):
        """Times optimizer steps between on_step_begin and on_step_end, which are after the batch is there."""

        def __init__(self) -> None:
            self.monitor = StepMonitor(predicted, **options)

        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            if "log" not in options:  # figures go where the Trainer's own do
                self.monitor.log = loggers(args.report_to)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.monitor.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.monitor.end()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.monitor.finish()

    return PresageTrainerCallback()


def lightning_callback(predicted: Any = None, **options: Any) -> Any:
    """A callback for Lightning's Trainer; options as for `presage.watch`."""
    base = _lightning().Callback

    class PresageLightningCallback(base):  # type: ignore[misc, valid-type]
        """Times training batches between their start and end hooks."""

        def __init__(self) -> None:
            self.monitor = StepMonitor(predicted, **options)

        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            self.monitor.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            self.monitor.end()
            if trainer.logger is not None and self.monitor.steps % self.monitor.every == 0:
                trainer.logger.log_metrics(self.monitor.metrics, step=trainer.global_step)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.monitor.finish()

    return PresageLightningCallback()


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise PresageError("the Lightning callback needs lightning: pip install lightning")
