"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2 with experts, and one more that every token passes, by its gate."""

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, MoESpec
from ..errors import ModelConfigError
from .base import LLAMA_NAMES, Architecture, llama_like
from .moe_parts import QWEN_MOE_NAMES, qwen_sparse_layers, with_experts


def _build(config: ModelConfig) -> DecoderConfig:
    if config.sliding_window is not None and config.layer_types is None:
        # transformers puts it into every other layer, the checkpoints' authors into the upper ones.
        raise ModelConfigError("use_sliding_window without layer_types is ambiguous in Qwen2-MoE, and not supported")
    spec = MoESpec(
        num_experts=config.integer("num_experts", 60),
        experts_per_token=config.integer("num_experts_per_tok", 4),
        intermediate_size=config.integer("moe_intermediate_size", 1408),
        normalize_weights=config.boolean("norm_topk_prob", False),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", 5632),
    )
    decoder = llama_like(config, config.windows(), qkv_bias=config.boolean("qkv_bias", True))
    return with_experts(decoder, spec, qwen_sparse_layers(config))


ARCHITECTURE = Architecture(
    name="Qwen2MoeForCausalLM",
    build=_build,
    names={**LLAMA_NAMES, **QWEN_MOE_NAMES},
    defaults={"use_sliding_window": False, "max_window_layers": 28},
)
