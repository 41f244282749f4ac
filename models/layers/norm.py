"""Normalisation by root mean square (Zhang and Sennrich 2019) or layer (Ba et al. 2016), in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..decoder_config import DecoderConfig


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


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """Over the last axis of ``x [..., D]`` with ``weight [D]`` and ``bias [D]`` or None."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    normed = normed * weight.astype(jnp.float32)
    return (normed if bias is None else normed + bias.astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """``[..., D] → [..., D]``. Parameters: ``weight [D]`` and, if asked for, ``bias [D]``."""

    def __init__(self, size: int, *, eps: float, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype)) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.weight[...], None if self.bias is None else self.bias[...], eps=self.eps)


def hidden_norm(config: DecoderConfig, dtype: jnp.dtype) -> RMSNorm | LayerNorm:
    """The norm of hidden states that the config asks for."""
    if config.norm_kind == "layer":
        return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias, dtype=dtype)
    return RMSNorm(config.hidden_size, eps=config.norm_eps, plus_one=config.norm_plus_one, dtype=dtype)
