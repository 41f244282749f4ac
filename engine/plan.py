"""``octavo plan``: what a model would take on a GPU that is not there, from the engine's own compiled steps."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..models.config import ModelConfig
from ..models.decoder import abstract_params, param_partition_specs
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelConfigError
from ..models.loading.resolve import ResolvedModel
from ..models.presets import PRESETS, preset_config
from ..pallas_kernels.aot import (
    AotUnavailableError,
    CompileReport,
    GpuTarget,
    compile_program,
    find_target,
    target_mesh,
)
from ..pallas_kernels.dispatch import Choice, Device
from .args import EngineArgs
from .buckets import Bucket, BucketTable
from .config import EngineConfig, ModelOptions
from .core_parts import kv_dtype
from .device_state import StateSpec, state_bytes
from .errors import ConfigError
from .find_model import find_model
from .host_tier import SWAP_CHUNK
from .launch import choose_attention, derive, host_planned_work, state_spec
from .memory import GPU_RESERVE_BYTES, MemoryPlan, describe_shortage
from .plan_report import Floor, KernelPlan, Plan, StepPlan
from .pool_size import cap_blocks
from .programs import LoadedModel, Programs
from .step_floor import StepWork, floor_seconds
from .step_work import shard_bytes, step_work

logger = logging.getLogger(__name__)

FLOOR_ROWS = (1, 8, 64, 256)
FLOOR_CONTEXTS = (1024, 4096)
MANY_LAYERS, FEW_LAYERS = 32, 8
"""A step of more than 32 layers is compiled with 8, which tell what a layer launches and what the temporaries are. One
of 80 layers compiles in 35 seconds of CPU, with 8 in 20; most of these go to what is outside of layers."""
TRIAL_BLOCKS = 2
"""Pool of the first compile; temporaries do not depend on it, since the pool is updated in place."""


class DraftEngine:
    """An engine without weights on the mesh of described GPUs: its programs can be compiled, not run.

    Unless ``all_layers``, what is compiled has few of the model's (``few_layers``); what it takes is told of all.
    """

    def __init__(
        self,
        args: EngineArgs,
        target: GpuTarget,
        progress: Callable[[str], None] = logger.info,
        *,
        all_layers: bool = True,
    ) -> None:
        self.target, self.progress = target, progress
        self.num_devices = args.tensor_parallel_size
        config = EngineConfig.from_args(args)
        resolved = _resolve(config)
        quantization = resolved.config.quantization
        self.quantization = None if quantization is None else quantization.name
        self.decoder, self.dtype, self.config = derive(config, resolved, None, "gpu")
        self.compiled = self.decoder if all_layers else few_layers(self.decoder)
        try:
            self.mesh = target_mesh(target, self.num_devices)
            device = Device.of(self.mesh.devices.flat[0])
            self.attention: Choice = choose_attention(self.config, device, self.decoder, self.dtype)
            _, self.params = self._model_of(self.decoder)
            graphdef, params = self._model_of(self.compiled)
        except (AotUnavailableError, ModelConfigError) as error:
            raise ConfigError(str(error)) from error
        work = host_planned_work(self.config, self.compiled, self.dtype, self.attention)
        self.model = LoadedModel(graphdef, params, self.mesh, work)
        self.buckets = BucketTable(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    def _model_of(self, decoder: DecoderConfig) -> tuple[Any, Any]:
        """Its static graph and its parameters, abstract and placed."""
        graphdef, params = abstract_params(decoder, self.dtype, self.attention.implementation, self.mesh)
        return graphdef, place_params(params, param_partition_specs(decoder), self.mesh)

    def state_spec(self, num_blocks: int) -> StateSpec:
        return state_spec(self.config, self.decoder, self.dtype, num_blocks)

    def compile(self, bucket: Bucket, num_blocks: int) -> CompileReport:
        """One step over a pool of ``num_blocks`` blocks."""
        self.progress(f"compiling {bucket} for {self.target.title}")
        spec = state_spec(self.config, self.compiled, self.dtype, num_blocks)
        programs = Programs(self.config, self.model, spec, self.buckets)
        return compile_program(partial(programs.lower_step, bucket), programs.compiler_options)

    def pool_bytes(self, num_blocks: int) -> int:
        """Of one device."""
        return self.state_spec(num_blocks).kv.bytes_per_block * num_blocks // self.num_devices

    def step_plan(self, bucket: Bucket, report: CompileReport) -> StepPlan:
        kernels = tuple(KernelPlan(k.name, k.registers, k.spill_bytes, k.shared_bytes) for k in report.kernels)
        in_layers = report.launches_in("_run_layer")
        return StepPlan(
            name=str(bucket),
            temp_bytes=report.temp_bytes,
            launches_per_layer=in_layers / self.compiled.num_layers,
            other_launches=len(report.instructions) - in_layers,
            command_buffers=report.command_buffers,
            loose_launches=len(report.launches_outside_command_buffers),
            kernels=kernels,
        )

    def memory(self, temporaries: int) -> MemoryPlan:
        small = self.state_spec(TRIAL_BLOCKS)
        return MemoryPlan(
            device=self.target.memory_bytes,
            usable=int(self.target.memory_bytes * self.config.cache.gpu_memory_utilization),
            weights=sum(shard_bytes(leaf) for leaf in jax.tree.leaves(self.params)),
            state=state_bytes(small),
            temporaries=temporaries,
            reserve=GPU_RESERVE_BYTES,
            block=small.kv.bytes_per_block // self.num_devices,
        )


def few_layers(decoder: DecoderConfig) -> DecoderConfig:
    """``decoder`` with its first ``FEW_LAYERS`` or a few more, if it has many and those come again and again."""
    layers = decoder.layers
    if len(layers) <= MANY_LAYERS:
        return decoder
    for period in range(1, FEW_LAYERS + 1):
        if all(layer == layers[at % period] for at, layer in enumerate(layers)):
            return replace(decoder, layers=layers[: -(-FEW_LAYERS // period) * period])
    return decoder


def make_plan(
    args: EngineArgs, target_name: str, progress: Callable[[str], None] = logger.info, *, all_layers: bool = False
) -> Plan:
    """Compiles the largest decode and mixed steps of the model for the target and works out what fits.

    ``args.model`` is a folder with a config.json, a GGUF file or a name in ``models.presets``; no weights are read.
    The steps that are compiled have a few of the model's layers, or ``all_layers``.
    Raises ConfigError for options that cannot be served, and where the CUDA plug-in is missing.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here may take a GPU that is in use
    try:
        target = find_target(target_name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    draft = DraftEngine(args, target, progress, all_layers=all_layers)
    mixed_bucket, decode_bucket = max(draft.buckets.mixed), max(draft.buckets.decode)
    mixed = draft.compile(mixed_bucket, TRIAL_BLOCKS)
    memory = draft.memory(mixed.temp_bytes)
    cache = draft.config.cache
    num_blocks = cache.num_blocks or (cache.memory_bytes or max(memory.pool, 0)) // memory.block
    num_blocks = cap_blocks(num_blocks, draft.config.block_size)
    draft.config, problem = _fit(draft.config, memory, num_blocks, draft.dtype.name)
    config = draft.config
    decode = draft.compile(decode_bucket, max(num_blocks, TRIAL_BLOCKS))
    work = step_work(draft.decoder, draft.params, memory.block // config.block_size)
    return Plan(
        model=args.model or draft.config.served_model_names[0],
        target=target.title,
        rates=f"{target.bytes_per_s / 1e12:g} TB/s, {target.flops_per_s / 1e12:g} TFLOP/s; {target.rates_from}",
        num_devices=draft.num_devices,
        dtype=draft.dtype.name,
        quantization=draft.quantization,
        kv_dtype=kv_dtype(config, draft.dtype).name,
        attention=f"{draft.attention.implementation} ({draft.attention.reason})",
        memory=memory,
        num_blocks=num_blocks if num_blocks >= 2 else 0,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        steps=(draft.step_plan(decode_bucket, decode), draft.step_plan(mixed_bucket, mixed)),
        num_layers=draft.decoder.num_layers,
        num_compiled=draft.compiled.num_layers,
        problem=problem,
        num_host_blocks=cache.swap_bytes // (memory.block * SWAP_CHUNK) * SWAP_CHUNK,
        **_floors(config, work, target, num_blocks),
    )


def _floors(config: EngineConfig, work: StepWork, target: GpuTarget, num_blocks: int) -> dict[str, Any]:
    floors = []
    contexts = [context for context in FLOOR_CONTEXTS if context <= config.max_model_len] or [config.max_model_len]
    for context in contexts:
        for rows in sorted({rows for rows in FLOOR_ROWS if rows < config.max_num_seqs} | {config.max_num_seqs}):
            seconds = floor_seconds(
                work.decode_bytes(rows, context),
                work.decode_flops(rows, context),
                target.bytes_per_s,
                target.flops_per_s,
            )
            blocks = rows * -(-context // config.block_size)
            floors.append(Floor(rows, context, seconds, fits=blocks < num_blocks))
    prefill = floor_seconds(
        work.weights_read(config.max_num_batched_tokens),
        work.prefill_flops(config.max_num_batched_tokens),
        target.bytes_per_s,
        target.flops_per_s,
    )
    return {"floors": tuple(floors), "prefill_seconds": prefill}


def _fit(config: EngineConfig, memory: MemoryPlan, num_blocks: int, dtype: str) -> tuple[EngineConfig, str | None]:
    """The configuration with its pool, or why there is none: in the words that a start would use."""
    problem = describe_shortage(memory, config, dtype=dtype, platform="gpu", num_blocks=max(num_blocks, 2))
    if problem is not None:
        return config, problem
    try:
        return config.with_pool(num_blocks, memory.block * config.tensor_parallel_size), None
    except ConfigError as error:
        return config, str(error)


def _resolve(config: EngineConfig) -> ResolvedModel:
    name = config.model.model
    if name is not None and (name in PRESETS or _is_bare_name(name)):
        return ResolvedModel(Path(name), "dummy", _preset(config.model))
    return find_model(replace(config.model, load_format="dummy"))


def _is_bare_name(name: str) -> bool:
    """Neither a file or folder nor a hub id, which has a slash: only a preset can be called so."""
    return "/" not in name and not name.startswith("~") and not Path(name).exists() and Path(name).suffix != ".gguf"


def _preset(options: ModelOptions) -> ModelConfig:
    try:
        return preset_config(str(options.model), options.hf_overrides).with_quantization(options.quantization)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error


def place_params(params: Any, specs: Any, mesh: Mesh) -> Any:
    """Abstract parameters with their shardings over ``mesh``."""

    def place(leaf: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, params, specs)


__all__ = ["DraftEngine", "make_plan", "place_params", "step_work"]
