"""Cohere 2 (Command R7B, Command A): attention beside the MLP, LayerNorm without bias, scaled logits, three windowed
layers with interleaved rope to a full one without rope."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, LayerSpec, RopeSpec
from .base import LLAMA_NAMES, Architecture, llama_like
from .gemma_parts import period_windows


def _build(config: ModelConfig) -> DecoderConfig:
    period = int(config.number("sliding_window_pattern", 4))
    windows = config.windows() if config.layer_types else period_windows(config, period)
    bias = config.attention_bias
    decoder = llama_like(
        config,
        windows,
        norm_kind="layer",
        parallel_block=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_multiplier=config.number("logit_scale", 0.0625),
    )
    return dataclasses.replace(decoder, layers=tuple(_with_rope(layer) for layer in decoder.layers))


def _with_rope(layer: LayerSpec) -> LayerSpec:
    rope: RopeSpec | None = None
    if layer.window is not None and layer.rope is not None:
        rope = dataclasses.replace(layer.rope, interleaved=True)
    return dataclasses.replace(layer, rope=rope)


ARCHITECTURE = Architecture(
    name="Cohere2ForCausalLM",
    build=_build,
    names=LLAMA_NAMES,
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096},
    config_keys={"layer_norm_eps": "rms_norm_eps"},
)
