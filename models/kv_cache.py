"""The KV pool: one array per layer, written by slot."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the pool. One layer is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: jnp.dtype

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


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Writes this step's keys and values into a layer's pool.

    kv ``[B, 2, K, S, H]``; k, v ``[T, K, H]``; slot_mapping i32[T]. A slot outside the pool
    (padding) is dropped, never clamped.
    """
    block_size = kv.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    new = jnp.stack([k, v], axis=1).astype(kv.dtype)  # [T, 2, K, H]
    return kv.at[block, :, :, offset].set(new, mode="drop")
