"""Mistral 7B and its successors: Llama with an optional sliding window in every layer."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    return llama_like(config, config.windows(all_sliding=True))


ARCHITECTURE = Architecture(name="MistralForCausalLM", build=_build, names=LLAMA_NAMES, permutes_gguf_heads=True)
