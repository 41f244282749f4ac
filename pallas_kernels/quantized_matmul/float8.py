"""Products of float8 by float8, left to XLA: it multiplies them as they are and scales the sums in the same kernel."""

import jax
import jax.numpy as jnp
from jax import lax


def float8_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """``(x * x_scale) · (weight * weight_scale)ᵀ``, with the scales after the product.

    Args:
      x: float8_e4m3fn ``[T, in]``.
      x_scale: f32 ``[T]``, or one number for all tokens.
      weight: float8_e4m3fn ``[out, in]``.
      weight_scale: f32 ``[out]``, or one number for all rows.

    Returns:
      ``[T, out]`` in ``out_dtype``; sums are float32.

    Raises:
      ValueError: types or shapes that do not fit.
    """
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dtype != jnp.float8_e4m3fn or operand.ndim != 2:
            raise ValueError(f"{name} must be float8_e4m3fn with two axes; got {operand.dtype} {list(operand.shape)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"cannot multiply x {list(x.shape)} by weight {list(weight.shape)}: the inner sizes differ")
    for name, scale, size in (("x_scale", x_scale, x.shape[0]), ("weight_scale", weight_scale, weight.shape[0])):
        if scale.shape not in ((), (size,)):
            raise ValueError(f"{name} must be [{size}] or one number; got {list(scale.shape)}")
    product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    per_token = x_scale if x_scale.ndim == 0 else x_scale[:, None]
    return (product * per_token * weight_scale).astype(out_dtype)
