"""One small file per architecture: its config.json read into a ``DecoderConfig``, its tensor names mapped to ours."""

import importlib
from typing import TYPE_CHECKING

from ..errors import ModelConfigError

if TYPE_CHECKING:
    from .base import Architecture

ARCHITECTURES: dict[str, str] = {
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Name in config.json's ``architectures`` → module of this package, imported on first use."""


def get_architecture(name: str) -> "Architecture":
    """The architecture with this config.json name; ModelConfigError if it is unknown."""
    module = ARCHITECTURES.get(name)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelConfigError(f"architecture {name!r} is not supported; supported: {known}")
    architecture: Architecture = importlib.import_module(f"{__name__}.{module}").ARCHITECTURE
    return architecture


__all__ = ["ARCHITECTURES", "get_architecture"]
