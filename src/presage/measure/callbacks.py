"""Callbacks for Hugging Face's Trainer and for Lightning: predicted against measured step time and memory, live.

    Trainer(..., callbacks=[presage.trainer_callback("prediction.json", out="run.json")])
    lightning.Trainer(callbacks=[presage.lightning_callback("prediction.json")])

Figures go where the Trainer's own logs go: TensorBoard, W&B, MLflow, or Lightning's logger.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from presage.errors import PresageError
from presage.measure.monitor import StepMonitor, loggers


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
