"""Mixtral: Mistral with a mixture of experts in every layer."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, MoESpec
from .base import LLAMA_NAMES, Architecture, llama_like
from .moe_parts import with_experts


def _build(config: ModelConfig) -> DecoderConfig:
    spec = MoESpec(
        num_experts=config.integer("num_local_experts", 8),
        experts_per_token=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
    )
    decoder = llama_like(config, config.windows(all_sliding=True))
    return with_experts(decoder, spec, range(config.num_layers))


ARCHITECTURE = Architecture(
    name="MixtralForCausalLM",
    build=_build,
    names={
        **LLAMA_NAMES,
        "router": ("block_sparse_moe.gate",),
        "expert_gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "expert_down": ("block_sparse_moe.experts.{}.w2",),
    },
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
)
