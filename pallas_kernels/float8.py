"""KV pools of float8 numbers, which are kept and moved about as bytes.

XLA for CPUs gathers and scatters no float8: it converts the whole operand to float16 first, and it changes no array's
type in place. For a KV pool either is a copy at every step. So a pool of uint8 holds the bits of float8_e4m3fn; what
is gathered from it is converted, and on a GPU, where that costs nothing, the kernels see it as float8.
"""

import jax
import jax.numpy as jnp

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
"""Four bits of exponent and three of mantissa, no infinities, up to 448."""


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type of a pool's array that holds numbers of ``dtype``."""
    return jnp.dtype(jnp.uint8) if dtype == FLOAT8 else jnp.dtype(dtype)


def number_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type of the numbers in a pool whose array is of ``dtype``."""
    return FLOAT8 if dtype == jnp.uint8 else jnp.dtype(dtype)


def as_bits(x: jax.Array) -> jax.Array:
    """A float8 array as uint8; any other as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FLOAT8 else x


def as_numbers(x: jax.Array) -> jax.Array:
    """A uint8 array as float8; any other as it is."""
    return jax.lax.bitcast_convert_type(x, FLOAT8) if x.dtype == jnp.uint8 else x
