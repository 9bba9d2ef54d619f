"""Measure training steps of Llama-like models on one GPU: Hugging Face's code, bf16, PyTorch's AdamW, eager.

    python tools/measure_steps.py OUT.json

A check of jobs (docs/own_steps.py). Needs torch and transformers only. Each case
is warmed up, then run for some seconds so that power and clocks settle; the median step and the peak memory are kept.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32_000
SECONDS = 6.0
# hidden, layers, heads, kv_heads, ffn, sequence, micro_batch, recompute
CASES = (
    (2048, 16, 32, 8, 8192, 2048, 8, "none"),
    (2048, 16, 32, 8, 8192, 8192, 2, "none"),
    (2048, 16, 32, 8, 8192, 2048, 8, "full"),
    (2048, 16, 32, 8, 8192, 512, 1, "none"),
    (4096, 8, 32, 8, 14336, 4096, 4, "none"),
    (4096, 8, 32, 8, 14336, 4096, 4, "full"),
    (4096, 8, 32, 32, 11008, 2048, 4, "none"),
    (4096, 8, 32, 8, 14336, 32768, 1, "full"),
    (8192, 4, 64, 8, 28672, 2048, 4, "none"),
    (8192, 4, 64, 8, 28672, 8192, 2, "full"),
    (1024, 24, 16, 16, 2816, 2048, 16, "none"),
    (5120, 6, 40, 40, 13824, 4096, 2, "none"),
)


def main() -> None:
    rows = []
    for case in CASES:
        rows.append(measured(*case))
        print(json.dumps(rows[-1]), flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vocab": VOCAB}
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        json.dump({"about": about, "rows": rows}, f, indent=1)


def measured(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, sequence: int, batch: int, recompute: str
) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, vocab_size=VOCAB, max_position_embeddings=sequence, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).train()
        torch.set_default_dtype(torch.float32)
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, VOCAB, (batch, sequence), device="cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    took = timed(step)
    return {
        "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "sequence": sequence,
        "micro_batch": batch, "recompute": recompute, "step_ms": 1e3 * statistics.median(took),
        "spread": statistics.pstdev(took) / statistics.mean(took), "steps": len(took),
        "allocated_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip


def timed(step: Any) -> list[float]:
    """Seconds of each step once the GPU is warm, each ended by a wait."""
    end, took = time.perf_counter() + SECONDS, []
    for _ in range(3):
        step()
    while time.perf_counter() < end:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return took[len(took) // 3 :]


if __name__ == "__main__":
    main()
