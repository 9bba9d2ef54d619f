"""Causal language modelling with Hugging Face's Trainer, as run_clm.py: dataclasses of arguments, bf16."""

import sys
import tempfile
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_type: str = field(default="gpt2", metadata={"help": "Model type to train from scratch"})
    config_overrides: str = field(default="", metadata={"help": "n_embd=10,resid_pdrop=0.2"})


@dataclass
class DataArguments:
    block_size: int = field(default=512)
    blocks: int = field(default=100000)


class GroupedTexts(Dataset):
    def __init__(self, blocks, block_size, vocab_size):
        self.blocks, self.tokens, self.block_size = blocks, torch.randint(vocab_size, (1 << 18,)), block_size

    def __len__(self):
        return self.blocks

    def __getitem__(self, i):
        start = i * 97 % (len(self.tokens) - self.block_size)
        ids = self.tokens[start : start + self.block_size].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": list(ids)}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    words = ["--output_dir", tempfile.mkdtemp(), "--report_to", "none", "--save_strategy", "no", *sys.argv[1:]]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(words)
    set_seed(training_args.seed)
    config = AutoConfig.for_model(model_args.model_type)
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    model = AutoModelForCausalLM.from_config(config)
    print(f"Training new model from scratch - Total size={sum(p.numel() for p in model.parameters()) / 2**20:.2f}M params")
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=GroupedTexts(data_args.blocks, data_args.block_size, config.vocab_size),
        data_collator=default_data_collator,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
