"""Random packed weights and the plain weights that they stand for, worked out in NumPy from the format."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class PackedCase:
    """A product of ``num_tokens`` tokens with a weight ``[out_size, in_size]``."""

    bits: int
    group_size: int
    num_tokens: int
    in_size: int
    out_size: int
    zeros: tuple[int, ...] | None = None
    """Zero points, counted from 0, that the groups have in turn; None: the middle for all."""
    dtype: str = "bfloat16"

    def codes(self) -> np.ndarray:
        """``[out, in]`` counted from 0; every code and every pair of neighbours occurs."""
        return np.random.default_rng(7).integers(0, 2**self.bits, (self.out_size, self.in_size))

    def scale(self) -> jax.Array:
        """Powers of 4 and what lies between: taking another group's shows."""
        shape = (self.out_size, self.in_size // self.group_size)
        return jnp.asarray(4.0 ** np.random.default_rng(8).uniform(-2, 1, shape), self.dtype)

    def zero_points(self) -> np.ndarray | None:
        if self.zeros is None:
            return None
        shape = (self.out_size, self.in_size // self.group_size)
        return np.resize(np.asarray(self.zeros), shape)

    def arguments(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """x, packed, scale and zero as ``quantized_matmul`` takes them."""
        x = jnp.asarray(np.random.default_rng(9).standard_normal((self.num_tokens, self.in_size)), self.dtype)
        zero, middle = self.zero_points(), 2 ** (self.bits - 1)
        packed = pack(self.codes() - middle, self.bits)
        return x, packed, self.scale(), None if zero is None else jnp.asarray(zero - middle, jnp.int8)

    def exact(self) -> np.ndarray:
        """``[T, out]`` in float64."""
        zero = self.zero_points()
        spread = 2 ** (self.bits - 1) if zero is None else np.repeat(zero, self.group_size, axis=1)
        scale = np.repeat(np.asarray(self.scale(), np.float64), self.group_size, axis=1)
        return np.asarray(self.arguments()[0], np.float64) @ ((self.codes() - spread) * scale).T


def pack(values: np.ndarray, bits: int) -> jax.Array:
    """Signed ``[out, in]`` → int32 ``[out, in * bits / 32]``, byte by byte."""
    fields = (values & ((1 << bits) - 1)).astype(np.uint8)
    if bits == 4:
        fields = fields[:, 0::2] | fields[:, 1::2] << 4
    return jnp.asarray(np.ascontiguousarray(fields).view("<i4"))


def row_errors(got: jax.Array, want: np.ndarray) -> float:
    """The worst row's largest error, of the row's largest number. NaN counts as infinite."""
    error = np.abs(np.asarray(got, np.float64) - want).max(axis=1) / np.abs(want).max(axis=1)
    return float(np.where(np.isnan(error), np.inf, error).max())
