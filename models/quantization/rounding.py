"""Plain weights to integers of a few bits, or to float8, and back.

Scales are rounded to numbers that float16 and bfloat16 both hold, and codes are chosen for the rounded scales. So a
checkpoint says the same in a model of either type.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FLOAT8_MAX = 448.0
_LEAST_SCALE = 2.0**-24
"""The smallest float16 above zero."""
_LARGEST_SCALE = 65280.0
"""The largest number that float16 and bfloat16 both hold."""


def storable_scales(scales: jax.Array) -> jax.Array:
    """f32 of any shape → the next larger that float16 and bfloat16 both hold (below 2⁻¹⁴ the nearest), never 0.

    Not a smaller one: the ends of a group's range would have no code.
    """
    limited = jnp.clip(scales, _LEAST_SCALE, _LARGEST_SCALE).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(limited, jnp.uint32)
    above = jax.lax.bitcast_convert_type((bits + 0xFFFF) & np.uint32(0xFFFF0000), jnp.float32)
    return above.astype(jnp.float16).astype(jnp.float32)


@dataclass(frozen=True)
class Rounded:
    """One weight as integers: ``w[o, i] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group]``."""

    codes: np.ndarray
    """u8 ``[out, in]``, counted from 0."""
    scales: np.ndarray
    """f32 ``[out, groups]``."""
    zeros: np.ndarray
    """u8 ``[out, groups]``."""

    def plain(self) -> np.ndarray:
        """The f32 ``[out, in]`` that it stands for."""
        codes = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        return ((codes - self.zeros[..., None]) * self.scales[..., None]).reshape(self.codes.shape)


@dataclass(frozen=True)
class IntegerGrid:
    """The integers that a group of weights, which share a scale and a zero point, may become."""

    bits: int
    group_size: int | None
    """Input columns; None: the whole row."""
    symmetric: bool = False
    """All zero points are in the middle."""
    lowest_zero: int = 0
    """GPTQ's first format cannot store a zero point of 0."""

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def size(self, in_size: int) -> int:
        """Columns of a group."""
        return self.group_size or in_size

    @partial(jax.jit, static_argnums=0)
    def fit(self, groups: jax.Array, shrink: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
        """``[..., n]`` → scales and zero points, f32 ``[...]``; ``shrink`` makes the range narrower than they are."""
        least, most = jnp.minimum(groups.min(-1), 0.0) * shrink, jnp.maximum(groups.max(-1), 0.0) * shrink
        if self.symmetric:
            scales = storable_scales(2 * jnp.maximum(most, -least) / self.top)
            return scales, jnp.full(scales.shape, float(1 << (self.bits - 1)))
        scales = storable_scales((most - least) / self.top)
        zeros = jnp.rint(-least / scales)
        if self.lowest_zero:
            # What lies above such a zero point has fewer codes.
            fewer = storable_scales(most / (self.top - self.lowest_zero))
            scales = jnp.where(zeros < self.lowest_zero, fewer, scales)
        return scales, jnp.clip(zeros, self.lowest_zero, self.top)

    def codes(self, values: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        """The nearest codes, f32, of values whose scales and zero points broadcast to them."""
        return jnp.clip(jnp.rint(values / scales) + zeros, 0.0, self.top)

    def rounded(self, groups: jax.Array, shrink: jax.Array | float = 1.0) -> jax.Array:
        """``[..., n]`` → what its nearest codes stand for, to be called inside jit."""
        scales, zeros = (array[..., None] for array in self.fit(groups, shrink))
        return (self.codes(groups, scales, zeros) - zeros) * scales

    def nearest(self, weight: np.ndarray, shrink: jax.Array | float = 1.0) -> Rounded:
        """f32 ``[out, in]``, each weight to the nearest code; ``shrink`` broadcasts to ``[out, groups]``."""
        groups = jnp.asarray(weight).reshape(len(weight), -1, self.size(weight.shape[1]))
        scales, zeros = self.fit(groups, shrink)
        codes = _codes(self, groups, scales, zeros)
        return Rounded(np.asarray(codes).reshape(weight.shape), np.asarray(scales), np.asarray(zeros, np.uint8))


@partial(jax.jit, static_argnums=0)
def _codes(grid: IntegerGrid, groups: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    return grid.codes(groups, scales[..., None], zeros[..., None]).astype(jnp.uint8)


def to_float8(weight: np.ndarray, *, per_channel: bool) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[out, in]`` → e4m3 of the same shape and scales f32, ``[out, 1]`` or ``[1]``, to multiply it by."""
    largest = np.abs(weight).max(axis=1, keepdims=True) if per_channel else np.abs(weight).max().reshape(1)
    scales = np.asarray(storable_scales(jnp.asarray(largest / FLOAT8_MAX)))
    return np.clip(weight / scales, -FLOAT8_MAX, FLOAT8_MAX).astype(ml_dtypes.float8_e4m3fn), scales
