"""Rotary position embedding (Su et al. 2021) and the ways to stretch it.

linear: position interpolation (Chen et al. 2023). dynamic: NTK-aware base for the whole stretched context.
llama3: by wavelength, as in Llama 3.1. yarn: Peng et al. 2023, with the factor on cos and sin.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..decoder_config import RopeSpec


class RopeTable(NamedTuple):
    """cos and sin of this step's tokens, each f32 ``[T, rotary_dim / 2]``; made once a step, read by every layer."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(spec: RopeSpec) -> np.ndarray:
    """Radians per token of each turning pair: f64 ``[rotary_dim / 2]``, on the host."""
    theta = spec.theta
    if spec.kind == "dynamic":
        # The base that a sequence of the longest stretched length would have. One base for all lengths keeps
        # cached keys valid; transformers lets it grow with the sequence.
        dim = spec.rotary_dim
        theta *= (spec.factor * spec.factor - (spec.factor - 1)) ** (dim / (dim - 2))
    plain = theta ** (-np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain


def _llama3(plain: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Short waves stay, long ones are stretched, those between are mixed."""
    turns = spec.original_max_position * plain / (2 * math.pi)
    mix = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    mix = np.clip(mix, 0.0, 1.0)
    return mix * plain + (1 - mix) * plain / spec.factor


def _yarn(plain: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """A ramp over dimensions from unstretched (many turns within the original context) to stretched (few)."""

    def dimension(turns: float) -> float:
        return (
            spec.rotary_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
        )

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return plain / spec.factor * stretched + plain * (1 - stretched)


def rope_table(positions: jax.Array, spec: RopeSpec) -> RopeTable:
    """The table for ``positions`` i32 ``[T]``."""
    frequencies = inverse_frequencies(spec).astype(np.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return RopeTable(jnp.cos(angles) * spec.attention_factor, jnp.sin(angles) * spec.attention_factor)


def apply_rope(x: jax.Array, table: RopeTable, *, interleaved: bool = False) -> jax.Array:
    """Turns the leading rotary_dim elements of ``x [T, N, H]``; element i pairs with i + rotary_dim / 2.

    ``interleaved``: 2i pairs with 2i + 1.
    """
    half = table.cos.shape[-1]
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    turning, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    pairs = turning.reshape(*x.shape[:-1], half, 2) if interleaved else None
    first = turning[..., :half] if pairs is None else pairs[..., 0]
    second = turning[..., half:] if pairs is None else pairs[..., 1]
    turned = [part.astype(x.dtype) for part in (first * cos - second * sin, second * cos + first * sin)]
    if pairs is None:
        return jnp.concatenate([*turned, rest], axis=-1)
    return jnp.concatenate([jnp.stack(turned, axis=-1).reshape(*x.shape[:-1], 2 * half), rest], axis=-1)
