"""A Transformer: what a model is made of, whatever it runs on. Dense or mixture of experts, any kind of attention."""

from __future__ import annotations

from dataclasses import dataclass

from presage.configs.vision import VisionTower

CLAMPED = "clamped_swiglu"  # whose inputs are held within limits first (gpt-oss)
GATED = ("swiglu", "geglu", "reglu", CLAMPED)  # three matrices in a feed-forward block; all others have two


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: low-rank queries and keys (DeepSeek)."""

    query_rank: int  # 0: queries are made at once
    key_rank: int
    rope: int  # of a head's dimensions, those with a position
    nope: int  # and those without
    value: int  # dimensions of a head's values


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of feed-forward blocks."""

    experts: int
    top_k: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # width of all shared experts together
    dense_layers: int = 0  # the first so many layers have none
    every: int = 1  # of the others, every so many
    capacity: float = 0.0  # a factor: tokens beyond it are dropped, experts are padded up to it. 0: none is dropped
    imbalance: float = 1.0  # tokens of the busiest rank's experts over the mean, where no loads are given
    groups: int = 0  # groups of experts of which a token may choose `group_top_k` (node-limited routing); 0: all
    group_top_k: int = 0
    loads: tuple[float, ...] = ()  # tokens of each expert, in any unit; empty for as many each
    latent: int = 0  # numbers of a token that experts are sent and work on (LatentMoE); 0: all of them

    def shares(self) -> tuple[float, ...]:
        """Shares of all tokens' choices that fall on each expert and are kept."""
        loads = self.loads or (1.0,) * self.experts
        total = sum(loads)
        most = self.capacity / self.experts if self.capacity else 1.0
        return tuple(min(load / total, most) for load in loads)

    def busiest(self, ep: int) -> float:
        """Tokens of the busiest rank's experts over the mean, where experts lie in order on so many ranks; with a
        capacity every expert is padded up to it."""
        if self.capacity:
            return self.capacity
        if not self.loads:
            return self.imbalance
        here = max(1, self.experts // ep)
        shares = self.shares()
        return max(sum(shares[i : i + here]) for i in range(0, self.experts, here)) * self.experts / here

    @property
    def dropped(self) -> float:
        """The share of tokens' choices beyond the capacity of their expert."""
        return max(0.0, 1 - sum(self.shares()))

    def most_domains(self, ranks: int, domain: int) -> int:
        """Domains that the experts of a token lie in at most, where groups of experts are spread over ranks; 0: all."""
        if not self.group_top_k or self.group_top_k >= self.groups:
            return 0
        domains = -(-ranks // domain)
        return max(1, -(-self.group_top_k * domains // self.groups))


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba-2 layers (state-space duality, arXiv 2405.21060)."""

    heads: int
    head_dim: int = 64
    state: int = 128  # numbers a head keeps for each of its dimensions
    groups: int = 8  # of heads that share inputs and outputs of the state
    conv: int = 4  # tokens of the convolution before the scan
    chunk: int = 128  # tokens that are multiplied at once, in a scan over chunks

    @property
    def width(self) -> int:
        """All heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the heads' inputs, and what writes and reads the state."""
        return self.width + 2 * self.groups * self.state

    def parameters(self, hidden: int) -> int:
        """Parameters of a layer's mixer: projections, convolution, decays, skips and steps of heads, a gated norm."""
        into = hidden * (self.width + self.convolved + self.heads)
        return into + self.convolved * (self.conv + 1) + 3 * self.heads + self.width + self.width * hidden


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention by a delta rule with gates: gated DeltaNet (arXiv 2412.06464) or Kimi's (arXiv 2510.26692)."""

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv: int = 4
    chunk: int = 64
    kind: str = "gated-delta"  # a decay for each head; kimi-delta: for each of its dimensions

    @property
    def keys(self) -> int:
        """All keys together, and all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def gates(self) -> int:
        """Columns of the input projection beside queries, keys and values: of gates and step sizes."""
        if self.kind == "kimi-delta":
            return 2 * self.value_dim + self.value_heads  # two of low rank
        return self.values + 2 * self.value_heads

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer's mixer."""
        wide = 2 * self.keys + self.values
        fixed = hidden * (wide + self.gates) + self.conv * wide + self.values * hidden + self.value_dim
        if self.kind == "kimi-delta":  # the low ranks' other halves, decays of heads, a shift for each dimension
            return fixed + self.value_dim * (self.keys + self.values) + self.key_heads + self.keys
        return fixed + 2 * self.value_heads


# Layers of a pattern by letter: what mixes tokens, and whether a feed-forward block follows. Capitals and signs are
# Megatron's (one block a layer); small letters are layers of a mixer and a feed-forward block.
LETTERS = {
    "M": ("mamba", False), "G": ("linear", False), "*": ("attention", False), "-": ("", True), "E": ("", True),
    "m": ("mamba", True), "g": ("linear", True), "a": ("attention", True), "w": ("attention", True),
}  # fmt: skip
EXPERTS_ONLY, DENSE_ONLY, WINDOW = "E", "-", "w"


@dataclass(frozen=True, slots=True)
class Transformer:
    """One stack of layers between an embedding and a vocabulary head."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    ffn: int
    kv_heads: int
    head_dim: int
    activation: str = "swiglu"  # swiglu, geglu, clamped_swiglu, gelu, relu, relu2 ...
    norm: str = "rmsnorm"  # or layernorm
    bias: bool = False  # of the linear layers
    tied: bool = False  # the head has the embedding's weights
    positions: str = "rope"  # rope, learned, none
    max_positions: int = 0  # learned ones
    window: int = 0  # tokens a query sees; 0: all before it
    window_every: int = 1  # every so many layers has the window, from the first on; the others see all
    latent: Latent | None = None
    experts: Experts | None = None
    predicted: int = 0  # further tokens predicted, a layer each (DeepSeek's MTP)
    causal: bool = True
    pattern: str = ""  # layers by letter (LETTERS) where not all have attention; empty: all have it
    mamba: Mamba | None = None
    linear: LinearAttention | None = None
    gated_attention: bool = False  # outputs of attention times a gate, made with the queries (Qwen3-Next)
    vision: VisionTower | None = None  # an encoder of images before the first layer
    chunked: bool = False  # the window is a chunk: a query sees those before it in its chunk (Llama 4)
    name: str = ""

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def query_width(self) -> int:
        """All heads' queries together."""
        return self.heads * (self.latent.rope + self.latent.nope if self.latent else self.head_dim)

    @property
    def value_width(self) -> int:
        """All heads' outputs together."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """All keys of a layer together."""
        return self.kv_heads * self.head_dim

    def mixer(self, layer: int) -> str:
        """What mixes tokens in a layer: attention, mamba, linear, or nothing."""
        return LETTERS[self.pattern[layer]][0] if self.pattern else "attention"

    def feeds(self, layer: int) -> str:
        """The feed-forward block of a layer: dense, experts, or none."""
        letter = self.pattern[layer] if self.pattern else ""
        if letter and (letter in (EXPERTS_ONLY, DENSE_ONLY) or not LETTERS[letter][1]):
            return {EXPERTS_ONLY: "experts", DENSE_ONLY: "dense"}.get(letter, "")
        return "experts" if self._routes(layer) else "dense"

    def _routes(self, layer: int) -> bool:
        e = self.experts
        return e is not None and layer >= e.dense_layers and (layer - e.dense_layers) % e.every == 0

    def has_experts(self, layer: int) -> bool:
        return self.feeds(layer) == "experts" if self.pattern else self._routes(layer)

    def has_window(self, layer: int) -> bool:
        if self.pattern and self.window_every == 1:
            return bool(self.window) and self.pattern[layer] == WINDOW
        return bool(self.window) and layer % self.window_every == 0

    def kind(self, layer: int) -> tuple[object, ...]:
        """Layers of one kind cost the same."""
        if not self.pattern:
            return self._routes(layer), self.has_window(layer)
        return self.mixer(layer), self.feeds(layer), self.has_window(layer)

    @property
    def expert_layers(self) -> int:
        return sum(self.has_experts(i) for i in range(self.layers))

    @property
    def feed_layers(self) -> int:
        """Layers with a feed-forward block."""
        return sum(bool(self.feeds(i)) for i in range(self.layers)) if self.pattern else self.layers

    # ---- parameters

    def attention_parameters(self, tp: int = 1) -> float:
        """Parameters of one layer's attention on one tensor-parallel rank, which holds one key head at least."""
        h, bias = self.hidden, int(self.bias)
        if self.latent is None:
            out = self.heads * self.head_dim / tp
            into = out * (2 if self.gated_attention else 1) + 2 * max(1.0, self.kv_heads / tp) * self.head_dim
            return (h + bias) * into + out * h + bias * h
        a = self.latent
        query = h * self.query_width / tp
        if a.query_rank:
            query = h * a.query_rank + a.query_rank * (1 + self.query_width / tp)
        key = h * (a.key_rank + a.rope) + a.key_rank * (1 + self.heads * (a.nope + a.value) / tp)
        return query + key + self.value_width / tp * h

    def mixer_parameters(self, mixer: str) -> int:
        """Parameters of what mixes tokens in a layer."""
        if mixer == "mamba":
            assert self.mamba is not None
            return self.mamba.parameters(self.hidden)
        if mixer == "linear":
            assert self.linear is not None
            return self.linear.parameters(self.hidden)
        return int(self.attention_parameters()) if mixer else 0

    def block_parameters(self, ffn: int, outer: int = 0) -> int:
        """Parameters of a feed-forward block of this width, on tokens of the model's width or another."""
        h, bias, up = outer or self.hidden, int(self.bias), 2 if self.gated else 1
        return (h + bias) * up * ffn + (ffn + bias) * h

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalisation."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def layer_parameters(self, layer: int) -> int:
        """Parameters of one layer, all experts included."""
        return self.outside_expert_parameters(layer) + self.expert_parameters(layer)

    def outside_expert_parameters(self, layer: int) -> int:
        """Parameters of one layer, all but the routed experts."""
        mixes, feeds = self.mixer(layer), self.feeds(layer)
        fixed = self.mixer_parameters(mixes) + (bool(mixes) + bool(feeds)) * self.norm_parameters
        if feeds != "experts":
            return fixed + (self.block_parameters(self.ffn) if feeds else 0)
        e = self.experts
        assert e is not None
        return fixed + self.router_parameters + (self.block_parameters(e.shared_ffn) if e.shared_ffn else 0)

    @property
    def expert_width(self) -> int:
        """Numbers of a token that its experts are sent."""
        return (self.experts.latent if self.experts else 0) or self.hidden

    @property
    def router_parameters(self) -> int:
        """Parameters of a layer's router, and of what makes tokens narrow before experts and wide after them."""
        e = self.experts
        return self.hidden * (e.experts + 2 * e.latent) if e else 0

    def expert_parameters(self, layer: int) -> int:
        """Parameters of one layer's routed experts."""
        e = self.experts
        return e.experts * self.block_parameters(e.ffn, e.latent) if e and self.has_experts(layer) else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden + (self.max_positions * self.hidden if self.positions == "learned" else 0)

    @property
    def head_parameters(self) -> int:
        """The last normalisation, and the head where it has weights of its own."""
        return self.norm_parameters + (0 if self.tied else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters, without multi-token-prediction layers, as model cards count."""
        layers = sum(self.layer_parameters(i) for i in range(self.layers))
        return self.embedding_parameters + layers + self.head_parameters + self.vision_parameters

    @property
    def vision_parameters(self) -> int:
        """Parameters of the encoder of images and its projector."""
        return self.vision.parameters(self.hidden) if self.vision else 0

    @property
    def trained_vision_parameters(self) -> int:
        """Those of its parameters that are trained: of a frozen tower the projector's alone."""
        v = self.vision
        return 0 if v is None else v.projector(self.hidden) if v.frozen else v.parameters(self.hidden)

    @property
    def active_parameters(self) -> int:
        """Those a token meets: of the experts only the chosen ones."""
        e = self.experts
        idle = (e.experts - e.top_k) * self.block_parameters(e.ffn, e.latent) * self.expert_layers if e else 0
        return self.parameters - idle
