"""Products with packed weights by XLA: the weight is widened as a whole, then multiplied.

XLA writes the widened weight to memory in every formulation that was tried (compiled for an H200: a shift and mask, an
int4 array, a product for each group), so for few tokens this reads and writes 9 times what the packed weight takes.
For many tokens it is what one wants.
"""

import jax
import jax.numpy as jnp
from jax import lax

WORD_BITS = 32


def quantized_matmul_xla(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    bits: int,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Arguments as in ``quantized_matmul``; ``[T, out]`` in ``out_dtype``, sums are float32."""
    # Else weights are widened before their turn, those of all layers at once: 0.9 GB a layer of a 72B model on 2 GPUs.
    x, packed = lax.optimization_barrier((x, packed))
    weight = dequantize(packed, scale, zero, bits=bits).astype(x.dtype)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def dequantize(packed: jax.Array, scale: jax.Array, zero: jax.Array | None, *, bits: int) -> jax.Array:
    """The plain f32 ``[out, in]``."""
    # To the top and back: the shift to the right brings the sign along.
    lifts = WORD_BITS - bits - jnp.arange(0, WORD_BITS, bits, dtype=jnp.int32)
    codes = (packed[..., None] << lifts) >> (WORD_BITS - bits)
    grouped = codes.reshape(*scale.shape, -1)
    if zero is not None:
        grouped = grouped - zero.astype(jnp.int32)[..., None]
    return (grouped.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]).reshape(packed.shape[0], -1)
