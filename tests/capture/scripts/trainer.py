"""Hugging Face's Trainer on a small Llama, options by HfArgumentParser."""

from dataclasses import dataclass

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    layers: int = 2
    length: int = 64


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = torch.arange(index, index + self.length) % 128
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main():
    model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=model_args.layers,
        num_attention_heads=4,
    )
    trainer = Trainer(LlamaForCausalLM(config), training_args, train_dataset=Tokens(model_args.length))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
