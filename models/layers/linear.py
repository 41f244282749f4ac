"""Products with weights. The only place that looks at how a weight is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...pallas_kernels.quantized_matmul import float8_matmul
from ..quantization.spec import WeightSpecs
from ..quantization.weights import (
    QUANTIZED_TYPES,
    Float8Weight,
    IntWeight,
    PartedWeight,
    QuantizedWeight,
    Weight,
    dequantize,
    empty_weight,
    rows_of,
)
from ..sharding import ONE_DEVICE, Placement
from .packed_product import kernel_serves, packed_product

_FEW_TOKENS = range(2, 49)
"""Token counts for which XLA:CPU multiplies faster with the weights on the left (1.4 to 2 times at 2 to 32)."""
MAX_FUSED_BYTES = 96 * 2**20
"""Of a fused product on one device; the parts of a larger one are computed one by one. What is worked out from the
parts elementwise then takes the place of one of them, while beside a fused product it is half as much again: 77 MB in a
prefill of 2048 tokens through a feed-forward of 18944. Products of that size lose nothing by being halved, and XLA has
them read their slice of the weights in place.
"""


@dataclass(frozen=True)
class HowServed:
    """What decides how a quantised weight is multiplied, besides the weight."""

    placement: Placement = ONE_DEVICE
    cut_columns: bool = False
    """Several devices share its columns, not its rows."""


PLAINLY = HowServed()


def matmul(x: jax.Array, weight: Weight, *, out_dtype: jnp.dtype | None = None, how: HowServed = PLAINLY) -> jax.Array:
    """``x [T, in]`` times ``weight [out, in]`` transposed → ``[T, out]``. The weight may be quantised.

    The result has ``out_dtype``, by default x's type. Sums are float32 in any case: XLA adds products of narrow
    types in float32 and rounds once, at the end; asking it for a float32 result would write twice the bytes.
    Raises ValueError if the inner sizes differ.
    """
    if x.ndim != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"cannot multiply x {x.shape} by weight {weight.shape}; expected [T, in] and [out, in]")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if isinstance(weight, QUANTIZED_TYPES):
        return _quantized_matmul(x, weight, out_dtype, how)
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


def _quantized_matmul(x: jax.Array, weight: QuantizedWeight, out_dtype: jnp.dtype, how: HowServed) -> jax.Array:
    if isinstance(weight, PartedWeight):
        return jnp.concatenate([matmul(x, part, out_dtype=out_dtype, how=how) for part in weight.parts], axis=-1)
    if isinstance(weight, IntWeight):
        if weight.permutation is not None:
            x = jnp.take(x, weight.permutation, axis=1, mode="clip")
        if kernel_serves(weight, x.dtype, how.placement, cut_columns=how.cut_columns):
            return packed_product(x, weight, how.placement, cut_columns=how.cut_columns, out_dtype=out_dtype)
        return _widened_product(x, weight, out_dtype)
    if weight.scale.shape[1] > 1:
        return _widened_product(x, weight, out_dtype)
    if weight.activations == "none":
        return _float8_weights(x, weight, out_dtype)
    cpu, default = (partial(product, out_dtype=out_dtype) for product in (_float8_weights, _float8_product))
    return jax.lax.platform_dependent(x, weight, cpu=cpu, default=default)


def _widened_product(x: jax.Array, weight: IntWeight | Float8Weight, out_dtype: jnp.dtype) -> jax.Array:
    """With the weight in x's type. Without the barrier XLA for GPUs widens weights before their turn, those of all
    layers at once, which takes as much memory as the plain model."""
    x, weight = jax.lax.optimization_barrier((x, weight))
    return matmul(x, dequantize(weight, x.dtype), out_dtype=out_dtype)


def _float8_weights(x: jax.Array, weight: Float8Weight, out_dtype: jnp.dtype) -> jax.Array:
    """x as it is. Every float8 number is exact in bfloat16, so the scales of rows can follow the product."""
    product = matmul(x, weight.weight.astype(x.dtype), out_dtype=jnp.dtype(jnp.float32))
    return (product * weight.scale[:, 0]).astype(out_dtype)


def _float8_product(x: jax.Array, weight: Float8Weight, out_dtype: jnp.dtype) -> jax.Array:
    """x rounded to float8, scaled so that its largest element is the largest float8 (or as the checkpoint says)."""
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    wide = x.astype(jnp.float32)
    if weight.input_scale is not None:
        scale = jnp.max(weight.input_scale)
    else:
        scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-12) / largest
    rounded = jnp.clip(wide / scale, -largest, largest).astype(jnp.float8_e4m3fn)
    x_scale = scale if scale.ndim == 0 else scale[:, 0]
    return float8_matmul(rounded, x_scale, weight.weight, weight.scale[:, 0], out_dtype=out_dtype)


def _split_columns(x: jax.Array, sizes: Sequence[int], num_shards: int) -> list[jax.Array]:
    """``x [T, sum(sizes)]`` of fused weights → one ``[T, size]`` per size.

    The columns come shard by shard, each with its share of every part (``WeightMapping.pieces``), so that no
    shard needs another's.
    """
    ends = np.cumsum([size // num_shards for size in sizes])
    shards = x.reshape(x.shape[0], num_shards, ends[-1])
    return [part.reshape(x.shape[0], -1) for part in jnp.split(shards, ends[:-1], axis=-1)]


class Linear(nnx.Module):
    """``x [T, in] → [T, out]``. Parameters: ``weight [out, in]`` and, if asked for, ``bias [out]``.

    ``specs`` say how the weight is quantised, one for each of the fused parts, whose rows are ``out_size`` then.
    ``input_shards``: devices over which the columns are cut. ``placement`` decides which kernels multiply it.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int | Sequence[int],
        *,
        bias: bool,
        dtype: jnp.dtype,
        specs: WeightSpecs = (),
        input_shards: int = 1,
        placement: Placement = ONE_DEVICE,
    ) -> None:
        sizes = (out_size,) if isinstance(out_size, int) else tuple(out_size)
        self.weight = nnx.Param(empty_weight(specs, sizes, in_size, dtype, input_shards))
        self.bias = nnx.Param(jnp.zeros((sum(sizes),), dtype)) if bias else None
        self.how = HowServed(placement, cut_columns=input_shards > 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _linear(x, self.weight.get_value(), None if self.bias is None else self.bias[...], self.how)

    def float32(self, x: jax.Array) -> jax.Array:
        """The same as f32: sums that are not rounded to x's type. Only for weights without bias."""
        return matmul(x, self.weight.get_value(), out_dtype=jnp.dtype(jnp.float32), how=self.how)

    def split(self, x: jax.Array, sizes: Sequence[int], num_shards: int) -> list[jax.Array]:
        """The same for fused weights, ``out = sum(sizes)``: one ``[T, size]`` per size."""
        out_size, weight = sum(sizes), self.weight.get_value()
        if isinstance(weight, PartedWeight):
            biases: Sequence[jax.Array | None] = [None] * len(sizes)
            if self.bias is not None:
                biases = [part[0] for part in _split_columns(self.bias[...][None], sizes, num_shards)]
            return [_linear(x, part, bias, self.how) for part, bias in zip(weight.parts, biases, strict=True)]
        if num_shards > 1 or x.shape[0] * out_size * x.dtype.itemsize <= MAX_FUSED_BYTES:
            return _split_columns(self(x), sizes, num_shards)
        ends = np.cumsum(sizes)
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        bias = None if self.bias is None else self.bias[...]
        return [_linear(x, _rows(weight, part), None if bias is None else bias[part], self.how) for part in parts]


def _rows(weight: Weight, rows: slice) -> Weight:
    return weight[rows] if isinstance(weight, jax.Array) else rows_of(weight, lambda array: array[rows])


def _linear(x: jax.Array, weight: Weight, bias: jax.Array | None, how: HowServed) -> jax.Array:
    if bias is None:
        return matmul(x, weight, how=how)
    product = matmul(x, weight, out_dtype=jnp.dtype(jnp.float32), how=how)
    return (product + bias.astype(jnp.float32)).astype(x.dtype)
