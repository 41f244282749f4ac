"""Starting an engine: memory fraction, model, pool size, programs. One path for ``LLM`` and the server alike."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from ..models.architectures import get_architecture
from ..models.decoder import abstract_params, param_partition_specs
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelConfigError
from ..models.loading.default_model import MODEL_NAME
from ..models.loading.errors import LoadError
from ..models.loading.loader import load_params
from ..models.loading.resolve import ResolvedModel
from ..models.sharding import split_over
from ..pallas_kernels.dispatch import Device
from ..pallas_kernels.float8 import FLOAT8
from ..pallas_kernels.tuning import use_folder
from .buckets import BucketTable
from .compile_cache import COMPILES, enable_compile_cache
from .config import GIB, EngineConfig
from .core import EngineCore
from .core_parts import choose_attention, host_planned_work, make_scheduler, state_spec
from .device_state import StateSpec
from .errors import ConfigError
from .host_tier import SWAP_CHUNK
from .memory import available_host_memory
from .model_runner import ModelRunner
from .pool_size import check_weights_fit, choose_num_blocks, explain_out_of_memory, weights_bytes
from .programs import LoadedModel

logger = logging.getLogger(__name__)


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


def make_cpu_devices(count: int) -> None:
    """Lets the CPU count as so many devices, or more if more were asked for. Must run before the first use of one.

    XLA's threads have to outnumber the devices, which hold one each while they wait for each other.
    """
    if jax.config.values["jax_num_cpu_devices"] < count > 1:
        jax.config.update("jax_num_cpu_devices", count)
        os.environ["NPROC"] = str(max(os.cpu_count() or 1, 2 * count + 2))


def make_mesh(num_devices: int) -> Mesh:
    """The first devices of this process, along "tp". Raises ConfigError if there are fewer."""
    devices = jax.devices()
    if num_devices > len(devices):
        raise ConfigError(
            f"tensor_parallel_size {num_devices} needs as many devices; this process has {len(devices)} "
            f"({devices[0].platform}: {devices[0].device_kind})"
            + (", since JAX was in use before the engine started" if devices[0].platform == "cpu" else "")
        )
    return Mesh(np.array(devices[:num_devices]), ("tp",), axis_types=(AxisType.Auto,))


def launch_core(
    config: EngineConfig,
    resolved: ResolvedModel,
    tokenizer_size: int | None,
    *,
    progress: bool = True,
    compile_bar: bool = False,
) -> tuple[EngineCore, EngineConfig]:
    """Loads weights, sizes the pool, compiles; the running core and the configuration with all derived values.

    ``tokenizer_size`` is the tokenizer's vocabulary, which the model's may exceed; None without a tokenizer. Raises
    ConfigError when the model or the options cannot be served.
    """
    was_up = backend_is_up()
    set_memory_fraction(config.cache.gpu_memory_utilization)
    if not was_up:
        make_cpu_devices(config.tensor_parallel_size)
    platform = jax.default_backend()
    if was_up and platform != "cpu":
        _warn_of_share_in_force(jax.devices()[0])
    enable_compile_cache(config.compile_cache_dir)
    use_folder(Path(config.tuned_config_folder) if config.tuned_config_folder else None)
    decoder_config, dtype, config = derive(config, resolved, tokenizer_size, platform)
    mesh = make_mesh(config.tensor_parallel_size)
    choice = choose_attention(config, Device.of(mesh.devices.flat[0]), decoder_config, dtype)
    small = state_spec(config, decoder_config, dtype, num_blocks=2)
    try:
        graphdef, shapes = abstract_params(decoder_config, dtype, choice.implementation, mesh, choice.interpret)
        check_weights_fit(config, weights_bytes(shapes, param_partition_specs(decoder_config), mesh), small, mesh)
        with explain_out_of_memory(config, "the weights were loaded"):
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
    buckets = BucketTable(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        mixed_serves_decode=platform == "cpu" and choice.implementation == "xla",
    )
    num_blocks = choose_num_blocks(config, model, small, buckets)
    config = config.with_pool(num_blocks, small.kv.bytes_per_block)
    spec = state_spec(config, decoder_config, dtype, config.num_blocks)
    config = with_host_tier(config, spec)
    with explain_out_of_memory(config, "the KV cache was made and the steps compiled"):
        runner = ModelRunner(config, model, spec, buckets)
        if not config.enforce_eager:
            runner.programs.warm_up(bar=compile_bar)
    COMPILES.mark_ready()
    async_scheduling = config.scheduler.async_scheduling and not runner.one_program_at_a_time
    return EngineCore(make_scheduler(config), runner, async_scheduling=async_scheduling), config


def with_host_tier(config: EngineConfig, spec: StateSpec) -> EngineConfig:
    """With the prefix cache's second tier, as large as asked for."""
    config = config.with_host_tier(spec.kv.bytes_per_block // config.tensor_parallel_size, available_host_memory())
    if config.cache.num_host_chunks:
        num_blocks = config.cache.num_host_chunks * SWAP_CHUNK
        logger.info(
            "KV cache in host memory: %.2f GiB, %d blocks", num_blocks * spec.kv.bytes_per_block / GIB, num_blocks
        )
    return config


def derive(
    config: EngineConfig, resolved: ResolvedModel, tokenizer_size: int | None, platform: str
) -> tuple[DecoderConfig, jnp.dtype, EngineConfig]:
    """What follows from the model and the platform: the decoder as the devices share it, the type it runs in, the
    configuration resolved."""
    model_config = resolved.config
    try:
        decoder_config = get_architecture(model_config.architecture).decoder_config(model_config)
        decoder_config = replace(decoder_config, scales_kv=config.cache.dtype == FLOAT8.name)
        shared_config = split_over(decoder_config, config.tensor_parallel_size)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    vocab_size = decoder_config.vocab_size
    if tokenizer_size is not None:
        vocab_size = min(vocab_size, tokenizer_size)
    config = config.resolve(
        platform=platform,
        context_len=model_config.max_context_tokens,
        model_path=str(resolved.path),
        model_name=config.model.model or MODEL_NAME,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(model_config.eos_token_ids),
    )
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype == "float16":
        logger.warning("dtype float16 overflows in many models that were trained in bfloat16; bfloat16 is safer")
    return shared_config, jnp.dtype(dtype), config


def _warn_of_share_in_force(device: jax.Device) -> None:
    """JAX reads its memory fraction once; a backend that was up before keeps its own."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    logger.warning(
        "JAX was in use before the engine started, so gpu_memory_utilization has no effect: "
        "JAX's share of the device's memory is %.2f GiB",
        limit / GIB,
    )
