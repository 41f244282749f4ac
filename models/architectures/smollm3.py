"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from ..errors import ModelConfigError
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    every = int(config.number("no_rope_layer_interval", 4))
    turns = config.raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(config.num_layers)]
    if not isinstance(turns, list | tuple) or len(turns) < config.num_layers:
        raise ModelConfigError(f"no_rope_layers must say 0 or 1 for each of {config.num_layers} layers, got {turns!r}")
    if config.layer_types is None and config.sliding_window is not None:
        windows = tuple(None if turn else config.sliding_window for turn in turns[: config.num_layers])
    else:
        windows = config.windows()
    bias = config.attention_bias
    decoder = llama_like(config, windows, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)
    pairs = zip(decoder.layers, turns, strict=False)
    layers = tuple(layer if turn else dataclasses.replace(layer, rope=None) for layer, turn in pairs)
    return dataclasses.replace(decoder, layers=layers)


ARCHITECTURE = Architecture(
    name="SmolLM3ForCausalLM",
    build=_build,
    names=LLAMA_NAMES,
    defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True, "use_sliding_window": False},
    permutes_gguf_heads=True,
)
