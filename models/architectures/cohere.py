"""Cohere (Command R): Cohere 2 with full attention and rope in every layer. Its norms of q and k, which only Command
R+ has, refuse."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from ..errors import ModelConfigError
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    if config.boolean("use_qk_norm", False):
        raise ModelConfigError("use_qk_norm is not supported: each head of q and k would have a LayerNorm of its own")
    bias = config.attention_bias
    decoder = llama_like(
        config,
        (None,) * config.num_layers,
        norm_kind="layer",
        parallel_block=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_multiplier=config.number("logit_scale", 0.0625),
    )
    layers = tuple(
        dataclasses.replace(layer, rope=layer.rope and dataclasses.replace(layer.rope, interleaved=True))
        for layer in decoder.layers
    )
    return dataclasses.replace(decoder, layers=layers)


ARCHITECTURE = Architecture(
    name="CohereForCausalLM",
    build=_build,
    names=LLAMA_NAMES,
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10_000.0},
    config_keys={"layer_norm_eps": "rms_norm_eps"},
)
