"""Tuning: which weights of a model are trained. All of them, or low-rank adapters (LoRA) beside frozen ones.

Adapters: arXiv 2106.09685. Frozen weights in four bits (QLoRA, arXiv 2305.14314): NF4 in blocks of 64 whose scales are
in 8 bits, with one fp32 scale for 256 of them; GPTQ (arXiv 2210.17323) in groups of 128 with a scale in fp16 and a
zero point.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from presage.configs.transformer import Transformer
from presage.errors import PresageError, near

# Bytes of a frozen weight of a layer, scales included. Embedding, head and norms stay in 16 bits.
BASES = {
    "16bit": 2.0,
    "fp8": 1.0,
    "int8": 1.0 + 2 / 128,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
    "gptq": 0.5 + 2.5 / 128,
}
PACKED = ("nf4", "gptq", "int8")  # unpacked to 16 bits before each GEMM
METHODS = ("full", "lora", "qlora")
ATTENTION = ("q", "k", "v", "o")
FEED_FORWARD = ("gate", "up", "down")
# Matrices that adapters may stand beside, by the names they go by: Hugging Face's, Megatron's, short ones.
TARGETS = {
    **{name: (name,) for name in (*ATTENTION, *FEED_FORWARD, "qkv", "fc1", "q_a", "q_b", "kv_a", "kv_b")},
    **{f"{name}_proj": (name,) for name in (*ATTENTION, *FEED_FORWARD, "qkv")},
    "wq": ("q",), "wk": ("k",), "wv": ("v",), "wo": ("o",), "w1": ("gate",), "w2": ("down",), "w3": ("up",),
    "c_attn": ("qkv",), "c_proj": ("o",), "query_key_value": ("qkv",), "dense": ("o",), "attention_qkv": ("qkv",),
    "attention_dense": ("o",), "mlp_fc1": ("fc1",), "mlp_fc2": ("down",), "linear_qkv": ("qkv",),
    "linear_proj": ("o",), "linear_fc1": ("fc1",), "linear_fc2": ("down",), "gate_up_proj": ("fc1",), "fc2": ("down",),
    "q_a_proj": ("q_a",), "q_b_proj": ("q_b",), "kv_a_proj_with_mqa": ("kv_a",), "kv_b_proj": ("kv_b",),
    "attention": ATTENTION, "mlp": FEED_FORWARD, "all-linear": (*ATTENTION, *FEED_FORWARD),
}  # fmt: skip


class Adapter(NamedTuple):
    """The two matrices beside one of a layer's: inputs x rank and rank x outputs, as wide as a rank has them."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Which weights are trained."""

    method: str = "full"  # or lora
    rank: int = 16
    targets: tuple[str, ...] = ATTENTION
    base: str = "16bit"  # what frozen weights are kept in: one of BASES
    adapter_bits: int = 16  # 32: PEFT keeps adapters in fp32, and multiplies so where there is no autocast
    dropout: bool = False  # before adapters
    residual_bits: int = 16  # between layers: PEFT's prepare_model_for_kbit_training makes it 32 (memory only)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are."""
        return self.method != "full"

    @property
    def packed(self) -> bool:
        """Whether frozen weights are unpacked before each GEMM."""
        return self.frozen and self.base in PACKED


FULL = Tuning()


def tuned_matrices(names: Iterable[str]) -> tuple[str, ...]:
    """Targets as short names, in order."""
    found: dict[str, None] = {}
    for name in names:
        if name not in TARGETS:
            raise PresageError(
                f"adapters know no matrix {name!r}{near(name, TARGETS)}: choose from {', '.join(TARGETS)}"
            )
        found |= dict.fromkeys(TARGETS[name])
    return tuple(found)


def block_adapters(t: Tuning, m: Transformer, block: str, tp: int = 1) -> tuple[Adapter, ...]:
    """Adapters of a block of a layer (the names of `transformer_layer`) on one tensor-parallel rank."""
    if not t.frozen:
        return ()
    return tuple(a for name, a in _matrices(m, block, tp).items() if name in t.targets)


def _matrices(m: Transformer, block: str, tp: int) -> dict[str, Adapter]:
    """Matrices that a block is made of."""
    h, keys = m.hidden, max(1, m.kv_heads // tp) * m.head_dim
    queries, ffn = m.query_width // tp, m.ffn // tp
    if block == "qkv":
        each = {"q": Adapter(h, queries), "qkv": Adapter(h, queries + 2 * keys)}
        return each if m.latent else each | {"k": Adapter(h, keys), "v": Adapter(h, keys)}
    if block == "proj":
        return {"o": Adapter(m.value_width // tp, h)}
    if block == "mlp_up":
        return {"up": Adapter(h, ffn), "fc1": Adapter(h, 2 * ffn if m.gated else ffn)} | (
            {"gate": Adapter(h, ffn)} if m.gated else {}
        )
    return {"down": Adapter(ffn, h)} if block == "mlp_down" else _narrow(m, block, tp)


def _narrow(m: Transformer, block: str, tp: int) -> dict[str, Adapter]:
    """Low-rank matrices of latent attention."""
    a = m.latent
    if a is None:
        return {}
    if block == "down_proj":
        return {"q_a": Adapter(m.hidden, a.query_rank), "kv_a": Adapter(m.hidden, a.key_rank + a.rope)}
    if block == "up_proj":
        wide = m.heads * (a.nope + a.value) // tp
        return {"kv_b": Adapter(a.key_rank, wide)} | (
            {"q_b": Adapter(a.query_rank, m.query_width // tp)} if a.query_rank else {}
        )
    return {}


MIXING, FEEDING = ("qkv", "proj", "down_proj", "up_proj"), ("mlp_up", "mlp_down")
ENTERS = ("qkv", "mlp_up", "up_proj")  # blocks whose outputs are cut over tensor-parallel ranks; others' inputs are


def adapter_parameters(t: Tuning, m: Transformer, layer: int, tp: int = 1) -> float:
    """Trained parameters of a layer on one rank; of an adapter both matrices are cut over tensor-parallel ranks."""
    blocks: tuple[str, ...] = MIXING if m.mixer(layer) == "attention" else ()
    blocks += FEEDING if m.feeds(layer) == "dense" else ()
    total = 0.0
    for block in blocks:
        for inputs, outputs in block_adapters(t, m, block, tp):
            total += inputs / tp + outputs if block in ENTERS else inputs + outputs / tp
    return t.rank * total


def tuning_problems(t: Tuning, m: Transformer) -> list[str]:
    """What of a tuning cannot be, in words."""
    if t.method not in METHODS:
        return [f"tune is {t.method!r}: choose from {', '.join(METHODS)}"]
    if not t.frozen:
        return []
    out = [] if t.base in BASES else [f"base is {t.base!r}: choose from {', '.join(BASES)}"]
    out += [] if 1 <= t.rank <= 65_536 else [f"rank >= 1: it is {t.rank}"]
    if t.adapter_bits not in (16, 32):
        out.append(f"adapter_bits is {t.adapter_bits}: choose 16 or 32")
    if t.residual_bits not in (16, 32):
        out.append(f"residual_bits is {t.residual_bits}: choose 16 or 32")
    inside = [x for x in t.targets if x in (*FEED_FORWARD, "fc1")]
    if inside and m.expert_layers == m.feed_layers:
        out.append(f"adapters on experts ({', '.join(inside)}) are not modelled: target attention (q, k, v, o)")
    if not any(block_adapters(t, m, b) for b in (*MIXING, *FEEDING)):
        out.append(f"no matrix of the model is called {', '.join(t.targets)}: target q, k, v, o, gate, up or down")
    return out


def tuning_text(t: Tuning) -> str:
    """In a few words; nothing where all weights are trained."""
    if not t.frozen:
        return ""
    base = "" if t.base == "16bit" else f" over {t.base} weights"
    return f"LoRA of rank {t.rank} on {' '.join(t.targets)}{base}"


def tuning_fields(t: Tuning) -> dict[str, object]:
    """As keys of a [training] table."""
    if not t.frozen:
        return {}
    lora = {"rank": t.rank, "targets": list(t.targets), "base": t.base, "adapter_bits": t.adapter_bits}
    return {"tune": t.method, "lora": lora | {"dropout": t.dropout, "residual_bits": t.residual_bits}}
