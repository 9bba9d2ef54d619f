"""Low-rank adapters put by hand into a frozen bf16 model of Hugging Face; only they are trained."""

import argparse
import math

import torch
import torch.nn as nn
from transformers import Qwen2Config, Qwen2ForCausalLM


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base, self.scaling, self.dropout = base, alpha / rank, nn.Dropout(dropout)
        for q in base.parameters():
            q.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        update = self.dropout(x).to(self.lora_A.dtype) @ self.lora_A.T @ self.lora_B.T
        return self.base(x) + (update * self.scaling).to(x.dtype)


def add_lora(model, targets, **settings):
    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear) and child in targets:
                setattr(module, child, LoRALinear(linear, **settings))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--micro-batch-size", type=int, default=4)
    p.add_argument("--cutoff-len", type=int, default=512)
    p.add_argument("--lora-r", type=int, default=8)
    p.add_argument("--lora-alpha", type=int, default=16)
    p.add_argument("--lora-dropout", type=float, default=0.05)
    p.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32000, hidden_size=1536, intermediate_size=8960, num_hidden_layers=args.layers,
        num_attention_heads=12, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for q in model.parameters():
        q.requires_grad = False
    add_lora(
        model, args.targets, rank=args.lora_r, alpha=args.lora_alpha, dropout=args.lora_dropout
    )
    model.to(args.device)
    model.train()
    trainable = [q for q in model.parameters() if q.requires_grad]
    total = sum(q.numel() for q in model.parameters())
    print(f"trainable params: {sum(q.numel() for q in trainable):,} of {total:,}")
    optimizer = torch.optim.AdamW(trainable, lr=3e-4)
    for step in range(args.steps):
        ids = torch.randint(config.vocab_size, (args.micro_batch_size, args.cutoff_len)).to(args.device)
        labels = ids.clone()
        labels[:, : args.cutoff_len // 8] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
