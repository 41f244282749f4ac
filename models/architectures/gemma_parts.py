"""What the Gemma generations share."""

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import ModelConfigError

GEMMA_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
"""Where Gemma's names differ from Llama's."""


def period_windows(config: ModelConfig, period: int) -> tuple[int | None, ...]:
    """A window in every layer but each ``period``-th."""
    return tuple(config.sliding_window if (layer + 1) % period else None for layer in range(config.num_layers))


def gemma_fields(config: ModelConfig) -> dict[str, Any]:
    """The DecoderConfig fields that differ from Llama's."""
    if config.raw.get("use_bidirectional_attention"):
        raise ModelConfigError("use_bidirectional_attention is not supported: this is an encoder")
    return {
        "norm_plus_one": True,
        "norm_placement": "both",
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping"),
        "final_softcap": config.optional_number("final_logit_softcapping"),
        "embedding_multiplier": config.hidden_size**0.5,
    }
