"""The host tier's memory, and the two programs that copy a chunk of blocks between it and the device's KV pool.

A chunk is one array ``[L, chunk_size, 2, K, S, H]`` of the pool's dtype, sharded over KV heads as the pool is. On a
GPU it lies in pinned host memory, and one copy engine moves it whole, by way of a temporary of a chunk's size. On a
CPU it is ordinary memory. Copies run in the order of their dispatch, between the steps before and after them, and the
host waits for none of them.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.kv_cache import KVCacheSpec
from .host_tier import SWAP_CHUNK, ChunkCopy

CHUNK_SPEC = P(None, None, None, "tp")
"""A chunk ``[L, chunk_size, 2, K, S, H]`` is split over KV heads."""


def memory_kind(mesh: Mesh) -> str | None:
    """Where chunks lie: on a CPU, all memory is the host's."""
    return None if mesh.devices.flat[0].platform == "cpu" else "pinned_host"


def abstract_chunk(spec: KVCacheSpec, mesh: Mesh, chunk_size: int = SWAP_CHUNK) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of a chunk."""
    shape = (spec.num_layers, chunk_size, *spec.layer_shape[1:])
    sharding = NamedSharding(mesh, CHUNK_SPEC, memory_kind=memory_kind(mesh))
    return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)


def swap_out(pinned: bool, kv: Sequence[jax.Array], chunk: jax.Array, block_ids: jax.Array) -> jax.Array:
    """The content of the pool's blocks ``block_ids`` i32[chunk_size], for ``chunk``, which is donated and overwritten.

    kv: per layer ``[B, 2, K, S, H]``. An id that only pads names any block. ``pinned``: the result is to lie in host
    memory.
    """
    del chunk
    stacked = jnp.stack([pool.at[block_ids].get(mode="clip") for pool in kv])
    return jax.device_put(stacked, jax.memory.Space.Host) if pinned else stacked


def swap_in(pinned: bool, kv: Sequence[jax.Array], chunk: jax.Array, block_ids: jax.Array) -> list[jax.Array]:
    """The pool, donated, with place i of ``chunk`` copied to block ``block_ids[i]``; B copies nothing."""
    if pinned:
        # Tracing takes an argument's type from its shape alone: without the first step it would be taken for an array
        # on the device already, the second would vanish, and XLA would compute on the host.
        chunk = jax.device_put(jax.device_put(chunk, jax.memory.Space.Host), jax.memory.Space.Device)
    return [pool.at[block_ids].set(chunk[layer], mode="drop") for layer, pool in enumerate(kv)]


def lower_swap_out(
    kv: Sequence[jax.Array], chunk: jax.ShapeDtypeStruct, block_ids: jax.ShapeDtypeStruct
) -> jax.stages.Lowered:
    # The old content is not read, but its memory is what the result is written to.
    program = jax.jit(
        partial(swap_out, _is_pinned(chunk)), donate_argnums=1, keep_unused=True, out_shardings=chunk.sharding
    )
    return program.lower(kv, chunk, block_ids)


def lower_swap_in(
    kv: Sequence[jax.Array], chunk: jax.ShapeDtypeStruct, block_ids: jax.ShapeDtypeStruct
) -> jax.stages.Lowered:
    shardings = [pool.sharding for pool in kv]
    program = jax.jit(partial(swap_in, _is_pinned(chunk)), donate_argnums=0, out_shardings=shardings)
    return program.lower(kv, chunk, block_ids)


def _is_pinned(chunk: jax.ShapeDtypeStruct) -> bool:
    # Not from its sharding's memory kind: a described GPU has no memories, and its shardings lose theirs.
    assert isinstance(chunk.sharding, NamedSharding)
    assert isinstance(chunk.sharding.mesh, Mesh)
    return memory_kind(chunk.sharding.mesh) is not None


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
