"""Watch real training loops on this machine's GPU beside their predictions; writes one JSON per loop to a folder.

python tools/measure_watch.py data/h200_watch/predictions.json OUT
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "workloads"), str(ROOT / "examples")]

import gpt  # noqa: E402
import torch  # noqa: E402
import watched  # noqa: E402

import presage  # noqa: E402

STEPS = 120


def plain(predicted: Any, out: Path, seconds: float = 0.0, **arguments: Any) -> None:
    """A plain loop over examples/gpt.py; the loader takes `seconds` per batch."""
    step = gpt.build("cuda", **arguments)

    def batches() -> Iterator[int]:
        for i in range(STEPS):
            time.sleep(seconds)
            yield i

    with presage.watch(predicted, out=out) as watch:
        for _ in watch(batches()):
            step()


def trainer(predicted: Any, out: Path) -> None:
    from torch.utils.data import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8 * STEPS

        def __getitem__(self, i: int) -> dict[str, Any]:
            tokens = torch.randint(50257, (512,))
            return {"input_ids": tokens, "labels": tokens}

    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=STEPS, bf16=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=1000, dataloader_num_workers=4, optim="adamw_torch_fused",
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    callback = presage.trainer_callback(predicted, out=out)
    Trainer(model, arguments, train_dataset=Tokens(), callbacks=[callback]).train()


def lightning(predicted: Any, out: Path) -> None:
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = watched.Mlp()

        def training_step(self, x: Any) -> Any:
            return torch.nn.functional.mse_loss(self.model(x), x)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-4)

    data = [torch.randn(8192, 4096, device="cuda")] * STEPS
    pl.Trainer(
        max_steps=STEPS, precision="bf16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[presage.lightning_callback(predicted, out=out)],
    ).fit(Module(), DataLoader(data, batch_size=None))  # fmt: skip


def main() -> None:
    predicted, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    cases = {
        "plain": lambda p, f: plain(p, f),
        "slow_loader": lambda p, f: plain(p, f, seconds=0.05),
        "host_bound": lambda p, f: plain(p, f, batch=1, sequence=128),
        "trainer": trainer,
        "lightning": lightning,
    }
    for name, run in cases.items():
        print(f"== {name}", flush=True)
        run(predicted[name], out / f"{name}.json")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
