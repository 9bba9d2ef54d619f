"""Speech recognition with a Whisper-like encoder and decoder: log-mel spectrograms made on the GPU, fp16 with scaler."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration


class LogMel(nn.Module):
    """Waveforms of 30 seconds to spectrograms, on the device of the model."""

    def __init__(self, n_fft=400, hop=160, mels=80):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("filters", torch.rand(mels, n_fft // 2 + 1) / n_fft)

    def forward(self, audio):
        stft = torch.stft(audio, self.n_fft, self.hop, window=self.window, return_complex=True)
        magnitudes = stft[..., :-1].abs() ** 2
        log_spec = torch.clamp(self.filters @ magnitudes, min=1e-10).log10()
        log_spec = torch.maximum(log_spec, log_spec.amax(dim=(1, 2), keepdim=True) - 8.0)
        return (log_spec + 4.0) / 4.0


def batches(args, vocab):
    generator = torch.Generator().manual_seed(args.seed)
    audio = torch.randn(args.batch_size, 480000, generator=generator)
    while True:
        tokens = torch.randint(0, vocab - 2, (args.batch_size, args.target_len), generator=generator)
        yield audio, tokens


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--target-len", type=int, default=128)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(args.seed)
    config = WhisperConfig(
        d_model=512, encoder_layers=args.layers, decoder_layers=args.layers, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False,
    )  # fmt: skip
    model, mel = WhisperForConditionalGeneration(config).to(args.device), LogMel().to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    scaler = torch.amp.GradScaler(args.device)
    for step, (audio, tokens) in enumerate(batches(args, config.vocab_size)):
        audio, tokens = audio.to(args.device), tokens.to(args.device)
        with torch.no_grad():
            features = mel(audio)
        with torch.autocast(args.device, dtype=torch.float16):
            logits = model(input_features=features, decoder_input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
        if step >= args.steps:
            break


if __name__ == "__main__":
    main()
