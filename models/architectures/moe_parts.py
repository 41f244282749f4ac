"""What the families with mixtures of experts share."""

import dataclasses
from collections.abc import Collection, Mapping

from ..config import ModelConfig
from ..decoder_config import DecoderConfig, MoESpec
from ..errors import ModelConfigError

QWEN_MOE_NAMES: Mapping[str, tuple[str, ...]] = {
    "router": ("mlp.gate",),
    "expert_gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "expert_down": ("mlp.experts.{}.down_proj",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}
"""Where a Qwen checkpoint keeps its experts."""


def with_experts(decoder: DecoderConfig, spec: MoESpec, layers: Collection[int]) -> DecoderConfig:
    """The decoder with a mixture of experts in these layers; the others stay dense."""
    changed = (
        dataclasses.replace(layer, moe=spec) if index in layers else layer for index, layer in enumerate(decoder.layers)
    )
    return dataclasses.replace(decoder, layers=tuple(changed))


def qwen_sparse_layers(config: ModelConfig) -> frozenset[int]:
    """Each ``decoder_sparse_step``-th layer, but for ``mlp_only_layers``."""
    step, dense = config.integer("decoder_sparse_step", 1), config.raw.get("mlp_only_layers", ())
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise ModelConfigError(f"mlp_only_layers must be a list of layers' numbers, got {dense!r}")
    return frozenset(i for i in range(config.num_layers) if (i + 1) % step == 0 and i not in dense)
