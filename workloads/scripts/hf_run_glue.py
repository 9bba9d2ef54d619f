"""BERT on pairs of sentences with Hugging Face's Trainer, as run_glue.py: padded to one length, fp16."""

import argparse
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class Pairs(Dataset):
    """Token ids of two sentences, padded to max_length with an attention mask."""

    def __init__(self, n, max_length, vocab_size):
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(max_length // 4, max_length, n)
        self.n, self.max_length, self.vocab_size = n, max_length, vocab_size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng, length, room = np.random.default_rng(i), int(self.lengths[i]), self.max_length
        ids = np.zeros(room, dtype=np.int64)
        ids[:length] = rng.integers(1000, self.vocab_size, length)
        segments = (np.arange(room) > length // 2) & (np.arange(room) < length)
        return {
            "input_ids": ids.tolist(),
            "token_type_ids": segments.astype(int).tolist(),
            "attention_mask": (np.arange(room) < length).astype(int).tolist(),
            "label": i % 2,
        }


def compute_metrics(p: EvalPrediction):
    return {"accuracy": (np.argmax(p.predictions, axis=1) == p.label_ids).mean().item()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=64)
    parser.add_argument("--max_steps", type=int, default=20000)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--use_cpu", action="store_true")
    args = parser.parse_args()
    set_seed(42)
    config = AutoConfig.for_model("bert", num_labels=2)
    model = AutoModelForSequenceClassification.from_config(config)
    training_args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.per_device_train_batch_size,
        learning_rate=args.learning_rate, max_steps=args.max_steps, fp16=torch.cuda.is_available(),
        report_to="none", save_strategy="no", eval_strategy="steps", eval_steps=5000, logging_steps=100,
        dataloader_num_workers=4, warmup_steps=100, use_cpu=args.use_cpu,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Pairs(67349, args.max_seq_length, config.vocab_size),
        eval_dataset=Pairs(872, args.max_seq_length, config.vocab_size),
        compute_metrics=compute_metrics,
        data_collator=default_data_collator,
    )
    trainer.train()


if __name__ == "__main__":
    main()
