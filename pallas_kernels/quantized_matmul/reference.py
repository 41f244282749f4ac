"""The definition of a product with packed weights, written the plain way."""

import jax
import jax.numpy as jnp


def quantized_matmul_reference(
    x: jax.Array, packed: jax.Array, scale: jax.Array, zero: jax.Array | None, *, bits: int
) -> jax.Array:
    """Arguments as in ``quantized_matmul``; the whole weight and the product in float32, ``[T, out]`` float32."""
    out_size, num_words = packed.shape
    fields = jnp.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)], axis=-1)
    codes = jnp.where(fields < 1 << (bits - 1), fields, fields - (1 << bits))
    grouped = codes.reshape(out_size, scale.shape[1], -1).astype(jnp.float32)
    if zero is not None:
        grouped = grouped - zero.astype(jnp.float32)[..., None]
    weight = (grouped * scale.astype(jnp.float32)[..., None]).reshape(out_size, num_words * 32 // bits)
    return jnp.dot(x.astype(jnp.float32), weight.T, precision=jax.lax.Precision.HIGHEST)
