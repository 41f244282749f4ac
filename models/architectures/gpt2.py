"""GPT-2: learned positions in place of rope, LayerNorm, biases everywhere, an MLP without a gate, and matrices that
the checkpoint stores transposed."""

import dataclasses

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from ..errors import ModelConfigError
from .base import Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    for key, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.boolean(key, plain) is not plain:
            raise ModelConfigError(f"{key} of {not plain} is not supported")
    if config.boolean("add_cross_attention", False):
        raise ModelConfigError("add_cross_attention is not supported: this is the decoder of an encoder")
    if config.quantization is not None:
        raise ModelConfigError("quantised weights of GPT-2 are not supported: they are stored transposed")
    decoder = llama_like(
        config,
        (None,) * config.num_layers,
        norm_kind="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        learned_positions=config.max_position_embeddings,
    )
    return dataclasses.replace(decoder, layers=tuple(dataclasses.replace(x, rope=None) for x in decoder.layers))


ARCHITECTURE = Architecture(
    name="GPT2LMHeadModel",
    build=_build,
    names={
        "embed": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
        "qkv": ("attn.c_attn",),
        "o": ("attn.c_proj",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
        "attention_norm": ("ln_1",),
        "mlp_norm": ("ln_2",),
    },
    layer_prefix="transformer.h.{}.",
    optional_prefix="transformer.",
    transposed=True,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    config_keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    ffn_factor=4,
    ignorable=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
