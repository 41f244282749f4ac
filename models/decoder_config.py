"""What a decoder is, as data: every switch by which the supported families differ. No jax here."""

from dataclasses import dataclass
from typing import Literal

from .errors import ModelConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["head", "full"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer. Which fields count depends on ``kind``; see ``layers.rope``."""

    theta: float
    rotary_dim: int
    """How many of a head's leading elements turn; even, at most head_dim."""
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
    """A mixture of experts in place of the dense MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool = True


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer. Layers with equal specs share one traced program."""

    rope: RopeSpec | None
    """None: no rotary embedding (NoPE)."""
    window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    moe: MoESpec | None = None


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
    norm_plus_one: bool = False
    """Norms multiply by ``1 + weight`` (Gemma)."""
    norm_placement: NormPlacement = "pre"
    """pre: x + f(norm x). post: x + norm(f x) (OLMo 2). both: x + norm(f(norm x)) (Gemma 2 and 3)."""
    qk_norm: QKNorm | None = None
    """head: over each head's H elements (Qwen3). full: over all heads together (OLMo 2)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    """Multiplies q·k; None means head_dim ** -0.5."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    attention_sinks: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Multiplies what each sublayer adds to the residual stream (Granite)."""
    logits_multiplier: float = 1.0
    tie_embeddings: bool = False

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
