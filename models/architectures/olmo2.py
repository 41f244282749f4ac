"""OLMo 2: norms only after each sublayer, and one over all heads of q and of k."""

from collections.abc import Mapping

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    bias = config.attention_bias
    windows = (None,) * config.num_layers
    return llama_like(config, windows, norm_placement="post", qk_norm="full", qkv_bias=bias, o_bias=bias)


OLMO_NAMES: Mapping[str, tuple[str, ...]] = {
    **LLAMA_NAMES,
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    build=_build,
    names=OLMO_NAMES,
    defaults={"rms_norm_eps": 1e-5},
)
