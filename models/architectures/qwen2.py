"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and a window in the upper layers if asked for."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    return llama_like(config, config.windows(), qkv_bias=True)


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM",
    build=_build,
    names=LLAMA_NAMES,
    defaults={"use_sliding_window": False, "max_window_layers": 28},
)
