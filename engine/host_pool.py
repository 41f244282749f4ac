"""The host tier's memory, and the two programs that copy a chunk of blocks between it and the device's KV pool.

A chunk is one array ``[L, chunk_size, 2, K, S, H]`` of the pool's dtype, sharded over KV heads as the pool is. On a
GPU it lies in pinned host memory, which the programs write and read directly: no staging buffer on the device, no
copy on the host. On a CPU it is ordinary memory. Copies run in the order of their dispatch, between the steps before
and after them, and the host waits for none of them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.kv_cache import KVCacheSpec
from .host_tier import SWAP_CHUNK, ChunkCopy

CHUNK_SPEC = P(None, None, None, "tp")
"""A chunk ``[L, chunk_size, 2, K, S, H]`` is split over KV heads."""


def chunk_sharding(mesh: Mesh) -> NamedSharding:
    """Pinned host memory, except on a CPU, where all memory is the host's."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return NamedSharding(mesh, CHUNK_SPEC, memory_kind=None if on_cpu else "pinned_host")


def abstract_chunk(spec: KVCacheSpec, mesh: Mesh, chunk_size: int = SWAP_CHUNK) -> jax.ShapeDtypeStruct:
    shape = (spec.num_layers, chunk_size, *spec.layer_shape[1:])
    return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=chunk_sharding(mesh))


def swap_out(kv: Sequence[jax.Array], chunk: jax.Array, block_ids: jax.Array) -> jax.Array:
    """The content of the pool's blocks ``block_ids`` i32[chunk_size], for ``chunk``, which is donated and overwritten.

    kv: per layer ``[B, 2, K, S, H]``. An id that only pads names any block.
    """
    del chunk
    return jnp.stack([pool.at[block_ids].get(mode="clip") for pool in kv])


def swap_in(kv: Sequence[jax.Array], chunk: jax.Array, block_ids: jax.Array) -> list[jax.Array]:
    """The pool, donated, with place i of ``chunk`` copied to block ``block_ids[i]``; B copies nothing."""
    on_device = jax.device_put(chunk, jax.memory.Space.Device)
    return [pool.at[block_ids].set(on_device[layer], mode="drop") for layer, pool in enumerate(kv)]


def lower_swap_out(kv: Sequence[jax.Array], chunk: jax.ShapeDtypeStruct, block_ids: jax.Array) -> jax.stages.Lowered:
    # The old content is not read, but its memory is what the result is written to.
    program = jax.jit(swap_out, donate_argnums=1, keep_unused=True, out_shardings=chunk.sharding)
    return program.lower(kv, chunk, block_ids)


def lower_swap_in(kv: Sequence[jax.Array], chunk: jax.ShapeDtypeStruct, block_ids: jax.Array) -> jax.stages.Lowered:
    program = jax.jit(swap_in, donate_argnums=0, out_shardings=[pool.sharding for pool in kv])
    return program.lower(kv, chunk, block_ids)


class HostPool:
    """Owns the chunks. They are made at the start, so that copying never asks for memory."""

    def __init__(self, spec: KVCacheSpec, mesh: Mesh, num_chunks: int, chunk_size: int = SWAP_CHUNK) -> None:
        self._num_blocks = spec.num_blocks
        self._chunk_size = chunk_size
        abstract = abstract_chunk(spec, mesh, chunk_size)
        self._make = jax.jit(lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding)
        self._chunks = [self._make() for _ in range(num_chunks)]

    def reset(self) -> None:
        """New chunks, after a failure that may have consumed one."""
        for place, chunk in enumerate(self._chunks):
            chunk.delete()
            self._chunks[place] = self._make()

    def save(self, program: jax.stages.Compiled, kv: Sequence[jax.Array], copy: ChunkCopy) -> None:
        """Dispatches a copy from the pool to a chunk."""
        self._chunks[copy.chunk] = program(kv, self._chunks[copy.chunk], self._block_ids(copy, padding=0))

    def restore(self, program: jax.stages.Compiled, kv: Sequence[jax.Array], copy: ChunkCopy) -> list[jax.Array]:
        """Dispatches a copy from a chunk to the pool, which is donated; the new pool."""
        return program(kv, self._chunks[copy.chunk], self._block_ids(copy, padding=self._num_blocks))

    def _block_ids(self, copy: ChunkCopy, padding: int) -> np.ndarray:
        ids = np.full(self._chunk_size, padding, np.int32)
        for block_id, place in copy.blocks:
            ids[place] = block_id
        return ids
