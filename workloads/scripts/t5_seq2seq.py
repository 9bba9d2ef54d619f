"""T5 on source and target texts in a plain loop: labels shifted by the model, Adafactor, gradient accumulation."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup
from transformers.optimization import Adafactor


class Summaries(Dataset):
    def __init__(self, n, source_len, target_len, vocab):
        self.n, self.source_len, self.target_len, self.vocab = n, source_len, target_len, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        source = torch.randint(1, self.vocab, (self.source_len,))
        mask = (torch.arange(self.source_len) < self.source_len - i % 64).long()
        target = torch.randint(1, self.vocab, (self.target_len,))
        return {"source_ids": source * mask, "source_mask": mask, "target_ids": target}


def train(epoch, model, device, loader, optimizer, scheduler, args):
    model.train()
    for step, data in enumerate(loader, 0):
        labels = data["target_ids"].to(device, dtype=torch.long)
        labels[labels == 0] = -100
        outputs = model(
            input_ids=data["source_ids"].to(device, dtype=torch.long),
            attention_mask=data["source_mask"].to(device, dtype=torch.long),
            labels=labels,
        )
        loss = outputs[0] / args.accumulate
        loss.backward()
        if (step + 1) % args.accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            print(f"Epoch {epoch} step {step} loss {loss.item() * args.accumulate:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--source_len", type=int, default=384)
    parser.add_argument("--target_len", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--adamw", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = T5Config(
        d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0, use_cache=False
    )  # t5-small
    model = T5ForConditionalGeneration(config).to(device)
    if args.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, 100000)
    data = Summaries(1_000_000, args.source_len, args.target_len, config.vocab_size)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=4)
    for epoch in range(args.epochs):
        train(epoch, model, device, loader, optimizer, scheduler, args)
