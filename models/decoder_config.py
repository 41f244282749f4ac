"""What a decoder is, as data: every switch by which the supported families differ. No jax here."""

from dataclasses import dataclass
from typing import Literal

from .errors import ModelConfigError
from .quantization.spec import WeightSpecs

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["head", "full"]
NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer. Which fields count depends on ``kind``; see ``layers.rope``."""

    theta: float
    rotary_dim: int
    """How many of a head's leading elements turn; even, at most head_dim."""
    interleaved: bool = False
    """Neighbours turn together (2i with 2i + 1: GPT-J, Cohere) instead of i with i + rotary_dim / 2."""
    kind: RopeKind = "default"
    factor: float = 1.0
    """By how much the context is stretched."""
    original_max_position: int = 0
    """Context in tokens before stretching (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the ramp's ends to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale, already worked out)."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelConfigError(f"rope type {self.kind!r} is unknown; known: {', '.join(ROPE_KINDS)}")
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ModelConfigError(f"rotary_dim must be positive and even, got {self.rotary_dim}")
        if self.theta <= 0 or self.factor <= 0:
            raise ModelConfigError(f"rope theta and factor must be positive, got {self.theta} and {self.factor}")
        if self.kind in ("llama3", "yarn", "dynamic") and self.original_max_position <= 0:
            raise ModelConfigError(f"rope type {self.kind!r} needs original_max_position_embeddings")


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts in place of the dense MLP: gated MLPs, of which a router picks some for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalize_weights: bool = True
    """The picked experts' probabilities are divided by their sum (``norm_topk_prob``)."""
    shared_intermediate_size: int | None = None
    """Of an MLP that every token passes too, times a sigmoid of its own gate (Qwen2-MoE); None: there is none."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            if getattr(self, name) <= 0:
                raise ModelConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ModelConfigError(f"{self.experts_per_token} experts per token, but only {self.num_experts} in all")
        if self.shared_intermediate_size is not None and self.shared_intermediate_size <= 0:
            raise ModelConfigError(f"shared_intermediate_size must be positive, got {self.shared_intermediate_size}")


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer. Layers with equal specs share one traced program."""

    rope: RopeSpec | None
    """None: no rotary embedding (NoPE)."""
    window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    moe: MoESpec | None = None
    quantization: tuple[tuple[str, WeightSpecs], ...] = ()
    """Linear layer ("qkv", "o", "gate_up", "up", "down") → how the checkpoint tensors it is made of are quantised."""

    def weight_specs(self, name: str) -> WeightSpecs:
        """Of one linear layer; () where nothing is quantised."""
        return dict(self.quantization).get(name, ())


@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder. Letters: V vocabulary, D hidden, F ffn, N query heads, K KV heads, H head dim."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_kind: NormKind = "rms"
    """Of the norms of hidden states. layer: less their mean, over their standard deviation (Ba et al. 2016)."""
    norm_bias: bool = False
    """Those norms add a bias; only for layer."""
    norm_plus_one: bool = False
    """Norms multiply by ``1 + weight`` (Gemma)."""
    norm_placement: NormPlacement = "pre"
    """pre: x + f(norm x). post: x + norm(f x) (OLMo 2). both: x + norm(f(norm x)) (Gemma 2 and 3)."""
    parallel_block: bool = False
    """x + attention(norm x) + mlp(norm x), with one norm (Cohere). Only with pre."""
    learned_positions: int | None = None
    """Rows of a table whose row p is added to the token at position p (GPT-2)."""
    qk_norm: QKNorm | None = None
    """head: over each head's H elements (Qwen3). full: over all heads together (OLMo 2)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    """down(activation(gate x) * up x); else down(activation(up x)) (GPT-2, StarCoder2)."""
    activation: Activation = "silu"
    attention_scale: float | None = None
    """Multiplies q·k; None means head_dim ** -0.5."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    attention_sinks: bool = False
    scales_kv: bool = False
    """The KV pool holds keys and values divided by two numbers of each layer: for pools of float8."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Multiplies what each sublayer adds to the residual stream (Granite)."""
    logits_multiplier: float = 1.0
    tie_embeddings: bool = False
    kv_head_copies: int = 1
    """Of each KV head of the checkpoint, one beside the other, where there are more devices than heads
    (``sharding.split_over``); ``num_kv_heads`` counts them all."""
    vocab_padding: int = 0
    """Rows of zeros at the end of the vocabulary, so that devices share it equally; ``vocab_size`` counts them."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in sizes:
            if getattr(self, name) <= 0:
                raise ModelConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.layers:
            raise ModelConfigError("a decoder needs at least one layer")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.norm_kind == "rms" and self.norm_bias:
            raise ModelConfigError("norm_bias needs norm_kind 'layer'")
        if self.norm_kind == "layer" and self.norm_plus_one:
            raise ModelConfigError("norm_plus_one needs norm_kind 'rms'")
        if self.parallel_block and self.norm_placement != "pre":
            raise ModelConfigError("parallel_block needs norm_placement 'pre'")
        for index, layer in enumerate(self.layers):
            if layer.rope is not None and layer.rope.rotary_dim > self.head_dim:
                raise ModelConfigError(
                    f"layer {index}: rotary_dim {layer.rope.rotary_dim} exceeds head_dim {self.head_dim}"
                )
            if layer.window is not None and layer.window <= 0:
                raise ModelConfigError(f"layer {index}: window must be positive, got {layer.window}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def q_size(self) -> int:
        """N * H."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """K * H."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope_specs(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary embeddings, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))
