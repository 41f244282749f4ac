"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen3 with experts, none of them shared."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, MoESpec
from .base import LLAMA_NAMES, Architecture, llama_like
from .moe_parts import QWEN_MOE_NAMES, qwen_sparse_layers, with_experts


def _build(config: ModelConfig) -> DecoderConfig:
    spec = MoESpec(
        num_experts=config.integer("num_experts", 128),
        experts_per_token=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 768),
        normalize_weights=config.boolean("norm_topk_prob", False),
    )
    bias = config.attention_bias
    decoder = llama_like(config, config.windows(all_sliding=True), qk_norm="head", qkv_bias=bias, o_bias=bias)
    return with_experts(decoder, spec, qwen_sparse_layers(config))


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM",
    build=_build,
    names={**LLAMA_NAMES, **QWEN_MOE_NAMES},
    defaults={"use_sliding_window": False},
    # transformers 5 writes num_local_experts.
    config_keys={"num_local_experts": "num_experts"},
)
