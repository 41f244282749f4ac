"""The attention of real models, which both Mosaic kernels are compiled for."""

from typing import Any

import jax.numpy as jnp

GPU_MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "qwen2.5-7b": {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    "qwen3-0.6b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 64},
    "mistral-7b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 32, "window": 4096},
    "gemma-2-9b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "window": 4096, "softcap": 50.0},
    "gpt-oss-20b": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "window": 128, "has_sinks": True},
    "llama-3-8b, float8 pool": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "kv_dtype": jnp.float8_e4m3fn},
    "gemma-2-9b, float8 pool": {
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 256,
        "window": 4096,
        "softcap": 50.0,
        "kv_dtype": jnp.float8_e4m3fn,
    },
    "phi-3-mini": {"num_heads": 32, "num_kv_heads": 32, "head_dim": 96, "block_size": 32, "dtype": jnp.float16},
}
