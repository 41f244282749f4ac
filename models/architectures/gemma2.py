"""Gemma 2: norms before and after each sublayer, soft-capped scores and logits, a window in every other layer."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like
from .gemma_parts import GEMMA_NAMES, gemma_fields, period_windows


def _build(config: ModelConfig) -> DecoderConfig:
    windows = config.windows() if config.layer_types else period_windows(config, 2)
    return llama_like(config, windows, **gemma_fields(config))


ARCHITECTURE = Architecture(
    name="Gemma2ForCausalLM",
    build=_build,
    names={**LLAMA_NAMES, **GEMMA_NAMES},
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
)
