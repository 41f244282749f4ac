"""Starting an engine: memory fraction, model, pool size, programs. One path for ``LLM`` and the server alike."""

import logging
import os
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from ..models.architectures import get_architecture
from ..models.decoder import abstract_params
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelConfigError
from ..models.kv_cache import KVCacheSpec
from ..models.loading.default_model import MODEL_NAME
from ..models.loading.errors import LoadError
from ..models.loading.loader import load_params
from ..models.loading.resolve import ResolvedModel, resolve_model
from ..pallas_kernels.dispatch import AttentionShape, Choice, Device, select_implementation
from ..pallas_kernels.work_lists import WorkListSpec
from .buckets import BucketTable
from .compile_cache import COMPILES, enable_compile_cache
from .config import GIB, EngineConfig
from .core import EngineCore
from .device_state import StateSpec, state_bytes
from .errors import ConfigError
from .host_tier import SWAP_CHUNK, HostTier
from .kv_cache_manager import KVCacheManager
from .model_runner import ModelRunner
from .programs import LoadedModel, Programs
from .scheduler import Scheduler
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = GIB
"""Default size of the KV pool on CPU."""
GPU_RESERVE_BYTES = GIB
"""Kept free of JAX's share of a GPU: results on their way, smaller programs' temporaries, fragmentation.

CUDA graphs and libraries live outside of that share.
"""


@dataclass(frozen=True)
class Frontend:
    """What the text half of an engine needs: no device in it."""

    resolved: ResolvedModel
    tokenizer: Tokenizer | None


def set_memory_fraction(fraction: float) -> None:
    """Sets the share of GPU memory that JAX takes. Must run before the first use of a device in this process."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{fraction:.4f}"


def backend_is_up() -> bool:
    """Whether this process has used a device: JAX has no question for that, but from then on refuses this option."""
    number = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def open_model(config: EngineConfig, *, skip_tokenizer: bool = False, chat_template: str | None = None) -> Frontend:
    """Finds the model's files and loads its tokenizer. Raises ConfigError."""
    options = config.model
    try:
        resolved = resolve_model(
            options.model,
            revision=options.revision,
            download_dir=options.download_dir,
            load_format=options.load_format,
            hf_overrides=options.hf_overrides,
        )
    except (LoadError, ModelConfigError) as error:
        raise ConfigError(str(error)) from error
    if skip_tokenizer:
        return Frontend(resolved, None)
    tokenizer = Tokenizer.load(
        str(resolved.path),
        options.tokenizer,
        # The model's own tokenizer is among its files already; another repository has revisions of its own.
        revision=options.revision if options.tokenizer == options.model else None,
        download_dir=options.download_dir,
        chat_template=chat_template,
    )
    return Frontend(resolved, tokenizer)


def launch_core(
    config: EngineConfig, frontend: Frontend, *, progress: bool = True, compile_bar: bool = False
) -> tuple[EngineCore, EngineConfig]:
    """Loads weights, sizes the pool, compiles; the running core and the configuration with all derived values.

    Raises ConfigError when the model or the options cannot be served.
    """
    was_up = backend_is_up()
    set_memory_fraction(config.cache.gpu_memory_utilization)
    platform = jax.default_backend()
    if was_up and platform != "cpu":
        _warn_of_share_in_force(jax.devices()[0])
    enable_compile_cache(config.compile_cache_dir)
    resolved = frontend.resolved
    decoder_config, dtype, config = derive(config, frontend, platform)
    mesh = Mesh(np.array(jax.devices()[: config.tensor_parallel_size]), ("tp",), axis_types=(AxisType.Auto,))
    choice = choose_attention(config, Device.of(mesh.devices.flat[0]), decoder_config, dtype)
    try:
        graphdef, _ = abstract_params(decoder_config, dtype, choice.implementation, mesh, choice.interpret)
        params = load_params(
            resolved.path,
            get_architecture(resolved.config.architecture),
            decoder_config,
            dtype=dtype,
            mesh=mesh,
            load_format=resolved.format,
            progress=progress,
        )
    except (LoadError, ModelConfigError) as error:
        raise ConfigError(str(error)) from error
    model = LoadedModel(graphdef, params, mesh, host_planned_work(config, decoder_config, dtype, choice))
    buckets = BucketTable(config.max_num_seqs, config.max_num_batched_tokens)
    config = config.with_pool(_num_blocks(config, model, decoder_config, dtype, buckets, platform))
    spec = state_spec(config, decoder_config, dtype, config.num_blocks)
    config = with_host_tier(config, spec)
    runner = ModelRunner(config, model, spec, buckets)
    if not config.enforce_eager:
        runner.programs.warm_up(bar=compile_bar)
    COMPILES.mark_ready()
    # XLA's collectives on a CPU can deadlock when two steps are in flight.
    async_scheduling = config.scheduler.async_scheduling and (platform != "cpu" or mesh.size == 1)
    return EngineCore(make_scheduler(config), runner, async_scheduling=async_scheduling), config


def with_host_tier(config: EngineConfig, spec: StateSpec) -> EngineConfig:
    """With the prefix cache's second tier, as large as asked for."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    config = config.with_host_tier(spec.kv.bytes_per_block // config.tensor_parallel_size, memory_bytes)
    if config.cache.num_host_chunks:
        num_blocks = config.cache.num_host_chunks * SWAP_CHUNK
        logger.info(
            "KV cache in host memory: %.2f GiB, %d blocks", num_blocks * spec.kv.bytes_per_block / GIB, num_blocks
        )
    return config


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
    )


def derive(config: EngineConfig, frontend: Frontend, platform: str) -> tuple[DecoderConfig, jnp.dtype, EngineConfig]:
    """What follows from the model and the platform: the decoder, the type it runs in, the configuration resolved."""
    model_config = frontend.resolved.config
    try:
        decoder_config = get_architecture(model_config.architecture).decoder_config(model_config)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    vocab_size = decoder_config.vocab_size
    if frontend.tokenizer is not None:
        vocab_size = min(vocab_size, frontend.tokenizer.vocab_size)
    config = config.resolve(
        platform=platform,
        context_len=model_config.max_context_tokens,
        model_path=str(frontend.resolved.path),
        model_name=config.model.model or MODEL_NAME,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(model_config.eos_token_ids),
    )
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype == "float16":
        logger.warning("dtype float16 overflows in many models that were trained in bfloat16; bfloat16 is safer")
    return decoder_config, jnp.dtype(dtype), config


def choose_attention(config: EngineConfig, device: Device, decoder: DecoderConfig, dtype: jnp.dtype) -> Choice:
    """The attention implementation for the model on ``device``. ConfigError if it cannot be the one asked for."""
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
    )


def state_spec(config: EngineConfig, decoder: DecoderConfig, dtype: jnp.dtype, num_blocks: int) -> StateSpec:
    """All sizes of the device's state with a pool of ``num_blocks`` blocks."""
    return StateSpec(
        kv=KVCacheSpec(
            num_layers=decoder.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=decoder.num_kv_heads,
            block_size=config.block_size,
            head_dim=decoder.head_dim,
            dtype=dtype,
        ),
        max_num_seqs=config.max_num_seqs,
        max_blocks=config.max_blocks_per_request,
        max_num_batched_tokens=config.max_num_batched_tokens,
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        dtype=dtype,
    )


def _num_blocks(
    config: EngineConfig,
    model: LoadedModel,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    buckets: BucketTable,
    platform: str,
) -> int:
    """Blocks of the pool, the null block included: as asked for, or what fits."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    small = state_spec(config, decoder, dtype, num_blocks=2)
    if config.cache.memory_bytes is not None:
        available = config.cache.memory_bytes
    elif platform == "cpu":
        available = CPU_POOL_BYTES
    else:
        available = _free_device_bytes(config, model, small, buckets)
    num_blocks = available // small.kv.bytes_per_block
    if num_blocks < 2:
        raise ConfigError(
            f"{available / GIB:.2f} GiB are left for the KV cache, but two blocks of {config.block_size} tokens take "
            f"{2 * small.kv.bytes_per_block / GIB:.2f} GiB; use fewer or smaller weights, raise "
            f"gpu_memory_utilization or kv_cache_memory_bytes, or lower max_num_batched_tokens"
        )
    logger.info("KV cache: %.2f GiB, %d blocks of %d tokens", available / GIB, num_blocks, config.block_size)
    return num_blocks


def _free_device_bytes(config: EngineConfig, model: LoadedModel, small: StateSpec, buckets: BucketTable) -> int:
    """What is left of JAX's share after weights, the rest of the state and the largest bucket's temporaries.

    Raises ConfigError on a device that does not tell its memory, as with JAX's "platform" allocator.

    The temporaries are read from the compiled program of the largest bucket over a two-block
    pool: they do not depend on the pool's size, which is updated in place.
    """
    stats = model.mesh.devices.flat[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError("the device does not tell how much memory it has; set kv_cache_memory_bytes")
    trial = replace(config, cache=replace(config.cache, num_blocks=2))
    temporaries = Programs(trial, model, small, buckets).temporary_bytes(buckets.mixed[-1])
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free - temporaries - state_bytes(small) - GPU_RESERVE_BYTES


def _warn_of_share_in_force(device: jax.Device) -> None:
    """JAX reads its memory fraction once; a backend that was up before keeps its own."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    logger.warning(
        "JAX was in use before the engine started, so gpu_memory_utilization has no effect: "
        "JAX's share of the device's memory is %.2f GiB",
        limit / GIB,
    )
