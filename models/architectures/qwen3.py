"""Qwen3 dense models: Qwen2 without biases, with an RMS norm on each head of q and k."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    bias = config.attention_bias
    return llama_like(config, config.windows(), qk_norm="head", qkv_bias=bias, o_bias=bias)


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    build=_build,
    names=LLAMA_NAMES,
    defaults={"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
)
