"""The shapes of a few well-known models, for planning without their files. No jax here."""

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, apply_overrides
from .errors import ModelConfigError


def _llama_like(architecture: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "rms_norm_eps": 1e-6, **keys}


_QWEN_72B: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _llama_like(
        "LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "qwen2.5-7b": _llama_like(
        "Qwen2ForCausalLM",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
    ),
    "qwen2.5-72b": _llama_like("Qwen2ForCausalLM", **_QWEN_72B, intermediate_size=29568),
    "qwen2.5-72b-awq": _llama_like(
        "Qwen2ForCausalLM",
        **_QWEN_72B,
        intermediate_size=29696,  # padded, so that groups of 128 can be shared by 8 devices
        quantization_config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
    "qwen3-0.6b": _llama_like(
        "Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "mistral-7b": _llama_like(
        "MistralForCausalLM",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
    ),
    "mixtral-8x7b": _llama_like(
        "MixtralForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-30b-a3b": _llama_like(
        "Qwen3MoeForCausalLM",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "gemma-2-9b": _llama_like(
        "Gemma2ForCausalLM",
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
}
"""Name -> the keys of its config.json that its shape follows from, as published."""


def preset_config(name: str, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration of a preset, with overrides put over it. ModelConfigError if the name is unknown."""
    if name not in PRESETS:
        raise ModelConfigError(f"model {name!r} is neither a file, a folder nor a preset; known: {', '.join(PRESETS)}")
    return ModelConfig.from_dict(apply_overrides(PRESETS[name], hf_overrides))
