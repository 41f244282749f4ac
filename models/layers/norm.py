"""Root-mean-square normalisation (Zhang and Sennrich 2019), in float32 whatever the input."""

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool = False) -> jax.Array:
    """Over the last axis of ``x [..., D]`` with ``weight [D]``; ``plus_one`` multiplies by ``1 + weight``."""
    wide, scale = x.astype(jnp.float32), weight.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * (1.0 + scale if plus_one else scale)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """``[..., D] → [..., D]``. Parameter: ``weight [D]``."""

    def __init__(self, size: int, *, eps: float, plus_one: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps, plus_one=self.plus_one)
