"""Phi-3 and Phi-4 with plain rope: Llama whose checkpoints fuse q, k, v and gate, up. Long-context rope refuses."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig
from .base import LLAMA_NAMES, Architecture, llama_like


def _build(config: ModelConfig) -> DecoderConfig:
    return llama_like(config, config.windows(all_sliding=True))


ARCHITECTURE = Architecture(
    name="Phi3ForCausalLM",
    build=_build,
    names={**LLAMA_NAMES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)},
    defaults={"rms_norm_eps": 1e-5},
)
