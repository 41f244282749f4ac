"""How many KV blocks an engine gets, and whether its model fits at all: decided before memory is asked for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding

from .buckets import BucketTable
from .config import GIB, EngineConfig, gib
from .device_state import StateSpec, state_bytes
from .errors import ConfigError
from .memory import (
    CPU_POOL_BYTES,
    CPU_RESERVE_BYTES,
    GPU_RESERVE_BYTES,
    MemoryPlan,
    available_host_memory,
    check_room,
)
from .programs import LoadedModel, Programs

logger = logging.getLogger(__name__)

MAX_SLOTS = 2**31 - 1
"""Tokens that a pool can hold: steps compute slot numbers in int32."""
AMPLE_BYTES = 8 * GIB
"""With so much to spare beside a pool of a given size, nobody has to compile a step to see that it fits."""


def weights_bytes(params: Any, specs: Any, mesh: Mesh) -> int:
    """Of one device: ``params`` are shapes and dtypes, ``specs`` say how each is sharded over ``mesh``."""

    def one(leaf: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
        return prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, params, specs)))


def check_weights_fit(config: EngineConfig, weights: int, small: StateSpec, mesh: Mesh) -> None:
    """Raises ConfigError for a model that will not fit, before its weights are read.

    ``weights`` are the bytes that they will take; ``small`` is the state with a pool of two blocks. Passes where the
    system does not tell how much memory there is.
    """
    memory = _memory(config, small, mesh, weights)
    if memory is not None:
        check_room(memory, config, dtype=small.dtype.name, platform=mesh.devices.flat[0].platform)


def choose_num_blocks(config: EngineConfig, model: LoadedModel, small: StateSpec, buckets: BucketTable) -> int:
    """Blocks of the pool, the null block included: as asked for, or what fits. ConfigError if it is too much.

    ``small`` is the state with a pool of two blocks, ``model`` is loaded. A GPU has to tell its memory, unless the
    pool's size is given.
    """
    platform = model.mesh.devices.flat[0].platform
    block = small.kv.bytes_per_block // model.mesh.size  # what is asked for is of each device
    weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.params))
    memory = _memory(config, small, model.mesh, weights, loaded=True)
    num_blocks = _asked_num_blocks(config, block)
    ample = num_blocks is not None and memory is not None and memory.pool - num_blocks * memory.block >= AMPLE_BYTES
    if memory is not None and platform != "cpu" and not ample:
        memory = replace(memory, temporaries=_temporaries(config, model, small, buckets))
    if num_blocks is None:
        if memory is None and platform != "cpu":
            raise ConfigError("the device does not tell how much memory it has; set kv_cache_memory_bytes")
        sizes = [CPU_POOL_BYTES // small.kv.bytes_per_block] if platform == "cpu" else []
        sizes += [memory.pool // memory.block] if memory is not None else []
        num_blocks = max(2, min(sizes))
    num_blocks = cap_blocks(num_blocks, config.block_size)
    if memory is not None:
        check_room(memory, config, dtype=small.dtype.name, platform=platform, num_blocks=num_blocks)
    size = gib(num_blocks * block) + (" of each device" if model.mesh.size > 1 else "")
    logger.info("KV cache: %s, %d blocks of %d tokens", size, num_blocks, config.block_size)
    return num_blocks


def cap_blocks(num_blocks: int, block_size: int) -> int:
    """So many blocks, or as many as have slots that int32 can number, the one past the last included."""
    most = MAX_SLOTS // block_size
    if num_blocks <= most:
        return num_blocks
    logger.warning("KV cache: %d of %d blocks are used: slots are numbered up to %d", most, num_blocks, MAX_SLOTS)
    return most


@contextmanager
def explain_out_of_memory(config: EngineConfig, doing: str) -> Iterator[None]:
    """Turns the end of memory into a ConfigError: others may take what was free when it was looked at."""
    try:
        yield
    except (MemoryError, JaxRuntimeError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"{config.served_model_names[0]} does not fit: memory ran out while {doing}. Does another process use it? "
            f"What would help: a smaller model or KV cache (kv_cache_memory_bytes), a lower gpu_memory_utilization, "
            f"max_num_seqs or max_num_batched_tokens"
        ) from error


def _asked_num_blocks(config: EngineConfig, block: int) -> int | None:
    """The pool's size where it was asked for; ``block`` are the bytes of one."""
    cache = config.cache
    if cache.num_blocks is not None or cache.memory_bytes is None:
        return cache.num_blocks
    num_blocks = cache.memory_bytes // block
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes {cache.memory_bytes} holds {num_blocks} blocks of {config.block_size} tokens, at "
            f"least 2 are needed: {gib(2 * block)}"
        )
    return num_blocks


def _memory(
    config: EngineConfig, small: StateSpec, mesh: Mesh, weights: int, *, loaded: bool = False
) -> MemoryPlan | None:
    """Where the memory of the fullest device goes, but for the temporaries of steps; None where the system does not
    tell. CPU devices share one memory, so there it is that of all of them."""
    devices, block, state = list(mesh.devices.flat), small.kv.bytes_per_block, state_bytes(small)
    if devices[0].platform == "cpu":
        free = available_host_memory()
        if free is None:
            return None
        swap = config.cache.swap_bytes * mesh.size
        if swap > free:
            raise ConfigError(f"swap_space: {gib(swap)} are more than the {gib(free)} of memory that are free")
        usable = total = free - swap
        weights, state, reserve = weights * mesh.size, state * mesh.size, CPU_RESERVE_BYTES
    else:
        known = [device.memory_stats() or {} for device in devices]
        if any("bytes_limit" not in stats for stats in known):
            return None
        stats = min(known, key=lambda stats: stats["bytes_limit"] - stats.get("bytes_in_use", 0))
        block //= mesh.size
        usable = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        total, reserve = int(stats["bytes_limit"] / config.cache.gpu_memory_utilization), GPU_RESERVE_BYTES
    return MemoryPlan(
        device=total,
        usable=usable + (weights if loaded else 0),
        weights=weights,
        state=state,
        temporaries=0,
        reserve=reserve,
        block=block,
    )


def _temporaries(config: EngineConfig, model: LoadedModel, small: StateSpec, buckets: BucketTable) -> int:
    """Bytes that the largest step needs besides its operands, read from its compiled program.

    They do not depend on the pool's size, since it is updated in place: two blocks do.
    """
    trial = replace(config, cache=replace(config.cache, num_blocks=2))
    return Programs(trial, model, small, buckets).temporary_bytes(buckets.mixed[-1])
