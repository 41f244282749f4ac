"""The KV pool: one array per layer, written by slot."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..pallas_kernels.float8 import as_bits, number_dtype


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the pool. One layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: jnp.dtype
    """Of the arrays: uint8 for a pool of float8_e4m3fn (``pallas_kernels.float8``)."""

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Of all layers together."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


def write_kv(
    kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, kv_scales: jax.Array | None = None
) -> jax.Array:
    """Writes this step's keys and values into a layer's pool.

    kv ``[B, 2, K, S, H]``; k, v ``[T, K, H]``; slot_mapping i32[T]. A slot outside the pool
    (padding) is dropped, never clamped. With ``kv_scales`` f32[2] the pool gets k and v divided by them. What a
    narrower pool cannot hold becomes the largest that it can; NaN stays NaN, so that it is seen in the logits.
    """
    block_size = kv.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    new = jnp.stack([k, v], axis=1)  # [T, 2, K, H]
    if kv_scales is not None:
        new = new.astype(jnp.float32) / kv_scales[:, None, None]
    new = _saturated(new, number_dtype(kv.dtype))
    return kv.at[block, :, :, offset].set(as_bits(new) if kv.dtype == jnp.uint8 else new, mode="drop")


def _saturated(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` as ``dtype``; beyond its range a plain cast would give NaN (float8) or infinity."""
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)
