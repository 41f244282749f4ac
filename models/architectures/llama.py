"""Llama 1 to 3 and the many checkpoints that use its name (SmolLM2, TinyLlama, DeepSeek's distillations)."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    """Full attention everywhere. ``attention_bias`` puts a bias on all four projections, o included."""
    bias = config.attention_bias
    windows = (None,) * config.num_layers
    return llama_like(config, windows, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


ARCHITECTURE = Architecture(name="LlamaForCausalLM", build=_build, names=LLAMA_NAMES, permutes_gguf_heads=True)
