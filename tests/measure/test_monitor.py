"""Loops watched by presage: figures, causes, files, and real Trainers on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import presage
from commands import shell
from presage.errors import PresageError
from presage.measure.comparison import LoopTiming, RankTiming, RunComparison, comparison_from_json
from presage.measure.prediction import Prediction

PREDICTED = Prediction({"p5": 0.018, "p50": 0.020, "p95": 0.022}, gpu_active=0.019, peak_memory=1000)


def loop(step: float = 0.021, wait: float = 0.0, active: float | None = 0.019) -> LoopTiming:
    return LoopTiming([step] * 10, [wait] * 10, active, 1000)


@pytest.mark.parametrize(
    ("timing", "cause"),
    [
        (loop(0.030, active=0.029), "gpu"),
        (loop(0.030, wait=0.010), "data"),
        (loop(0.030), "host"),
        (loop(0.030, wait=0.010, active=0.029), "gpu"),  # the GPU computes on while the host waits for data
    ],
)
def test_the_largest_difference_is_named(timing: LoopTiming, cause: str) -> None:
    found = RunComparison(PREDICTED, timing)
    assert found.largest is not None and found.largest[0] == cause
    assert sum(found.differences.values()) == pytest.approx(0.010)


def test_a_slow_rank_is_named() -> None:
    ranks = tuple(RankTiming(r, 0.030, 0.0, 0.029 if r == 3 else 0.019) for r in range(8))
    found = RunComparison(PREDICTED, loop(0.030, active=0.019), ranks)
    assert found.largest is not None and found.largest[0] == "rank"
    assert "slow rank 3" in found.headline


def test_within_the_interval_or_not() -> None:
    assert RunComparison(PREDICTED, loop(0.021)).within
    assert "outside the 90% interval" in RunComparison(PREDICTED, loop(0.030)).headline


def test_a_loop_in_three_lines(tmp_path: Path) -> None:
    with presage.watch(0.001, out=tmp_path / "run.json", quiet=True) as watch:
        for _ in watch(range(12)):
            time.sleep(0.005)
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["steps"] == 7 and data["step_ms"]["p50"] >= 5
    assert data["slower"] > 1 and data["largest_difference"] == "step"


def test_waiting_for_data_is_seen() -> None:
    def batches() -> object:
        for i in range(12):
            time.sleep(0.01)
            yield i

    with presage.watch(0.001, quiet=True) as watch:
        for _ in watch(batches()):  # type: ignore[arg-type]
            pass
    assert watch.result is not None and watch.result.largest is not None
    assert watch.result.largest[0] == "data"


def test_figures_are_logged_and_a_slow_loop_is_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[tuple[int, float]] = []
    with presage.watch(1e-4, every=5, log=lambda m, step: logged.append((step, m["presage/slower"]))) as watch:
        for _ in watch(range(20)):
            time.sleep(0.002)
    assert [step for step, _ in logged] == [10, 15, 20]
    assert capsys.readouterr().err.count("slower than predicted") == 1


def test_a_failing_loop_keeps_its_error() -> None:
    with pytest.raises(KeyError), presage.watch() as watch:
        for _ in watch(range(3)):
            raise KeyError("user's")


def test_what_is_written_is_read_again() -> None:
    found = RunComparison(PREDICTED, loop(0.030), (RankTiming(0, 0.03, 0.0, 0.019),))
    again = comparison_from_json(json.loads(json.dumps(found.to_json())))
    assert again.differences == pytest.approx(found.differences) and again.ranks == found.ranks


def test_compare_names_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RunComparison(PREDICTED, loop(0.030, wait=0.010)).to_json()))
    out = shell("compare", path).stdout
    assert "30 ms/step measured, 20 ms predicted (+50.0%, outside the 90% interval)" in out
    assert "waiting for data (+10 ms)" in out


@pytest.mark.parametrize("text", ["{}", "[]", '{"kind": "comparison", "per_step_ms": []}'])
def test_compare_says_what_is_wrong_with_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    found = shell("compare", path)
    assert found.returncode == 2 and "presage.watch" in found.stderr and "Traceback" not in found.stderr


def test_a_logger_that_is_not_known_is_named() -> None:
    with pytest.raises(PresageError, match="choose from tensorboard, wandb, mlflow"):
        presage.watch(log="excel")


def test_hugging_face_trainer(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.tensor(i % 2)} for i in range(40)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=12, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    callback = presage.trainer_callback(0.5, out=tmp_path / "run.json", quiet=True)
    model = transformers.BertForSequenceClassification(config)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 7


def test_lightning_trainer(tmp_path: Path) -> None:
    torch, lightning = pytest.importorskip("torch"), pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: object) -> object:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> object:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[presage.lightning_callback(0.5, out=tmp_path / "run.json", quiet=True)], enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=2))
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 7
