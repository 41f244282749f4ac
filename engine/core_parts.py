"""What an engine's core is put together from, given a configuration and a decoder. No weights, files or tokenizers."""

import jax.numpy as jnp

from ..models.decoder_config import DecoderConfig
from ..models.kv_cache import KVCacheSpec
from ..pallas_kernels.dispatch import AttentionShape, Choice, Device, select_implementation
from ..pallas_kernels.float8 import storage_dtype
from ..pallas_kernels.work_lists import WorkListSpec
from .admission import QueueLimits
from .config import EngineConfig
from .device_state import StateSpec
from .errors import ConfigError
from .host_tier import HostTier
from .kv_cache_manager import KVCacheManager
from .scheduler import Scheduler


def make_scheduler(config: EngineConfig) -> Scheduler:
    """The scheduler over the pool that ``config`` describes."""
    cache = config.cache
    kv = KVCacheManager(
        config.num_blocks,
        config.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        host_tier=HostTier(cache.num_host_chunks) if cache.num_host_chunks else None,
    )
    return Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        seed=config.seed,
        limits=QueueLimits(config.scheduler.max_num_queued_reqs, config.scheduler.max_num_queued_tokens),
    )


def choose_attention(config: EngineConfig, device: Device, decoder: DecoderConfig, dtype: jnp.dtype) -> Choice:
    """The attention implementation for the model on ``device``. ConfigError if it cannot be the one asked for."""
    if config.attention_backend == "mosaic" and device.platform == "cpu" and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"attention_backend 'mosaic' cannot be used: JAX interprets GPU kernels on a CPU for one device only, and "
            f"tensor_parallel_size is {config.tensor_parallel_size}"
        )
    try:
        return select_implementation(device, _attention_shape(config, decoder, dtype), config.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def host_planned_work(
    config: EngineConfig, decoder: DecoderConfig, dtype: jnp.dtype, choice: Choice
) -> WorkListSpec | None:
    """What the host plans for the chosen kernels of each device; None where they want nothing."""
    if choice.implementation != "mosaic":
        return None
    shape = _attention_shape(config, decoder, dtype, config.tensor_parallel_size)
    windows = (layer.window for layer in decoder.layers)
    return WorkListSpec.of(shape, config.max_blocks_per_request, windows, choice.interpret)


def _attention_shape(
    config: EngineConfig, decoder: DecoderConfig, dtype: jnp.dtype, num_shards: int = 1
) -> AttentionShape:
    return AttentionShape(
        num_heads=decoder.num_heads // num_shards,
        num_kv_heads=decoder.num_kv_heads // num_shards,
        head_dim=decoder.head_dim,
        block_size=config.block_size,
        dtype=dtype.name,
        kv_dtype=kv_dtype(config, dtype).name,
    )


def kv_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """The type of keys and values in the cache of a model that runs in ``dtype``."""
    return dtype if config.cache.dtype == "auto" else jnp.dtype(config.cache.dtype)


def state_spec(config: EngineConfig, decoder: DecoderConfig, dtype: jnp.dtype, num_blocks: int) -> StateSpec:
    """All sizes of the device's state with a pool of ``num_blocks`` blocks."""
    return StateSpec(
        kv=KVCacheSpec(
            num_layers=decoder.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=decoder.num_kv_heads,
            block_size=config.block_size,
            head_dim=decoder.head_dim,
            dtype=storage_dtype(kv_dtype(config, dtype)),
        ),
        max_num_seqs=config.max_num_seqs,
        max_blocks=config.max_blocks_per_request,
        max_num_batched_tokens=config.max_num_batched_tokens,
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        dtype=dtype,
    )
