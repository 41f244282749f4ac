"""OLMo 3: OLMo 2 with a window in three layers of four; a stretched rope is for the full layers only."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, LayerSpec, RopeSpec
from ..rope_config import EVERY_LAYER
from .base import Architecture, llama_like
from .gemma_parts import period_windows
from .olmo2 import OLMO_NAMES


def _build(config: ModelConfig) -> DecoderConfig:
    bias = config.attention_bias
    windows = config.windows() if config.layer_types else period_windows(config, 4)
    decoder = llama_like(config, windows, norm_placement="post", qk_norm="full", qkv_bias=bias, o_bias=bias)
    if EVERY_LAYER not in config.ropes:
        return decoder

    def with_own_rope(layer: LayerSpec) -> LayerSpec:
        """transformers 4 writes one rope, of which the windowed layers have the theta alone."""
        if layer.window is None or layer.rope is None:
            return layer
        return dataclasses.replace(layer, rope=RopeSpec(theta=layer.rope.theta, rotary_dim=layer.rope.rotary_dim))

    return dataclasses.replace(decoder, layers=tuple(with_own_rope(layer) for layer in decoder.layers))


ARCHITECTURE = Architecture(
    name="Olmo3ForCausalLM",
    build=_build,
    names=OLMO_NAMES,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    context_includes_rope=True,
)
