"""Products with weights. The only place that looks at how a weight is stored."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_FEW_TOKENS = range(2, 49)
"""Token counts for which XLA:CPU multiplies faster with the weights on the left (1.4 to 2 times at 2 to 32)."""
MAX_FUSED_BYTES = 96 * 2**20
"""Of a fused product on one device; the parts of a larger one are computed one by one. What is worked out from the
parts elementwise then takes the place of one of them, while beside a fused product it is half as much again: 77 MB in a
prefill of 2048 tokens through a feed-forward of 18944. Products of that size lose nothing by being halved, and XLA has
them read their slice of the weights in place.
"""


def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x [T, in]`` times ``weight [out, in]`` transposed → ``[T, out]``.

    The result has ``out_dtype``, by default x's type. Sums are float32 in any case: XLA adds products of narrow
    types in float32 and rounds once, at the end; asking it for a float32 result would write twice the bytes.
    Raises ValueError if the inner sizes differ.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"cannot multiply x {x.shape} by weight {weight.shape}; expected [T, in] and [out, in]")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    right, left = partial(_weights_right, out_dtype=out_dtype), partial(_weights_left, out_dtype=out_dtype)
    if x.shape[0] not in _FEW_TOKENS:
        return right(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=left, default=right)


def _weights_right(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _weights_left(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """Without the barrier XLA turns the transposed product back into ``x · weightᵀ``."""
    product = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return jax.lax.optimization_barrier(product).T


def _split_columns(x: jax.Array, sizes: Sequence[int], num_shards: int) -> list[jax.Array]:
    """``x [T, sum(sizes)]`` of fused weights → one ``[T, size]`` per size.

    The columns come shard by shard, each with its share of every part (``WeightMapping.pieces``), so that no
    shard needs another's.
    """
    ends = np.cumsum([size // num_shards for size in sizes])
    shards = x.reshape(x.shape[0], num_shards, ends[-1])
    return [part.reshape(x.shape[0], -1) for part in jnp.split(shards, ends[:-1], axis=-1)]


class Linear(nnx.Module):
    """``x [T, in] → [T, out]``. Parameters: ``weight [out, in]`` and, if asked for, ``bias [out]``."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return _linear(x, self.weight[...], None if self.bias is None else self.bias[...])

    def split(self, x: jax.Array, sizes: Sequence[int], num_shards: int) -> list[jax.Array]:
        """The same for fused weights, ``out = sum(sizes)``: one ``[T, size]`` per size."""
        out_size = sum(sizes)
        if num_shards > 1 or x.shape[0] * out_size * x.dtype.itemsize <= MAX_FUSED_BYTES:
            return _split_columns(self(x), sizes, num_shards)
        ends = np.cumsum(sizes)
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]
        return [_linear(x, weight[part], None if bias is None else bias[part]) for part in parts]


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return matmul(x, weight)
    product = matmul(x, weight, out_dtype=jnp.dtype(jnp.float32))
    return (product + bias.astype(jnp.float32)).astype(x.dtype)
