"""A Llama-like model trained with accelerate, as run_clm_no_trainer.py: accumulation, schedule, checkpoints."""

import argparse
import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, get_scheduler


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--per_device_train_batch_size", type=int, default=4)
    p.add_argument("--block_size", type=int, default=1024)
    p.add_argument("--learning_rate", type=float, default=5e-5)
    p.add_argument("--weight_decay", type=float, default=0.1)
    p.add_argument("--max_train_steps", type=int, default=100000)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--num_warmup_steps", type=int, default=10)
    p.add_argument("--hidden_size", type=int, default=1024)
    p.add_argument("--num_layers", type=int, default=8)
    p.add_argument("--checkpointing_steps", type=int, default=5000)
    p.add_argument("--output_dir", default=None)
    p.add_argument("--mixed_precision", default="bf16")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class Blocks(Dataset):
    def __init__(self, n, size, vocab):
        self.n, self.size, self.tokens = n, size, torch.randint(vocab, (1 << 18,))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        ids = self.tokens[i * 131 % (len(self.tokens) - self.size) :][: self.size]
        return {"input_ids": ids, "labels": ids.clone()}


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=args.hidden_size, intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.num_layers, num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=args.hidden_size // 256, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    data = Blocks(args.max_train_steps * args.per_device_train_batch_size, args.block_size, config.vocab_size)
    loader = DataLoader(
        data, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    no_decay = ["bias", "norm.weight", "layernorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=args.max_train_steps
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    out, completed_steps, total_loss = args.output_dir or tempfile.mkdtemp(), 0, 0.0
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if completed_steps % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(out, f"step_{completed_steps}"))
            if completed_steps % 50 == 0:
                accelerator.print(f"step {completed_steps}: loss {total_loss.item() / (step + 1):.4f}")
        if completed_steps >= args.max_train_steps:
            break


if __name__ == "__main__":
    main()
