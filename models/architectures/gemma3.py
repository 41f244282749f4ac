"""Gemma 3 (text): Gemma 2 with normalised q and k, five windowed layers to a full one, and a rope for each kind."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, LayerSpec, RopeSpec
from ..rope_config import EVERY_LAYER
from .base import LLAMA_NAMES, Architecture, llama_like
from .gemma_parts import GEMMA_NAMES, gemma_fields, period_windows


def _build(config: ModelConfig) -> DecoderConfig:
    period = int(config.number("sliding_window_pattern", 6))
    windows = config.windows() if config.layer_types else period_windows(config, period)
    decoder = llama_like(config, windows, qk_norm="head", **gemma_fields(config))
    if EVERY_LAYER not in config.ropes:
        return decoder
    local = RopeSpec(theta=config.number("rope_local_base_freq", 10_000.0), rotary_dim=config.head_dim)

    def with_own_rope(layer: LayerSpec) -> LayerSpec:
        """transformers 4 writes one rope, for the full layers, and the theta of the windowed ones beside it."""
        return layer if layer.window is None else dataclasses.replace(layer, rope=local)

    return dataclasses.replace(decoder, layers=tuple(with_own_rope(layer) for layer in decoder.layers))


ARCHITECTURE = Architecture(
    name="Gemma3ForCausalLM",
    build=_build,
    names={**LLAMA_NAMES, **GEMMA_NAMES},
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
    },
    context_includes_rope=True,
)
