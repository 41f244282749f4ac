"""Granite 3 dense models: Llama with four multipliers."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    bias = config.attention_bias
    return llama_like(
        config,
        (None,) * config.num_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.mlp_bias,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / config.number("logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture(name="GraniteForCausalLM", build=_build, names=LLAMA_NAMES, permutes_gguf_heads=True)
