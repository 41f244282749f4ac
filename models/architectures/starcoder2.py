"""StarCoder2: LayerNorm, biases everywhere, an MLP without a gate, and a window in every layer if one is given."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    bias = config.boolean("use_bias", True)
    return llama_like(
        config,
        config.windows(all_sliding=True),
        norm_kind="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


_SHARED_NAMES = {part: names for part, names in LLAMA_NAMES.items() if part != "gate_up"}

ARCHITECTURE = Architecture(
    name="Starcoder2ForCausalLM",
    build=_build,
    names={**_SHARED_NAMES, "up": ("mlp.c_fc",), "down": ("mlp.c_proj",)},
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    config_keys={"norm_epsilon": "rms_norm_eps"},
)
