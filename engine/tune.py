"""``octavo tune``: measures the sizes of a model's kernels on the GPU at hand and writes them down."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..models.architectures import get_architecture
from ..models.decoder import abstract_params
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelConfigError
from ..models.presets import PRESETS, preset_config
from ..models.quantization.weights import IntWeight
from ..pallas_kernels.autotune import (
    OPERATIONS,
    AttentionTask,
    CandidateError,
    Measure,
    Task,
    Trial,
    TuningShape,
    sweep,
)
from ..pallas_kernels.autotune_products import GroupedTask, QuantizedTask
from ..pallas_kernels.dispatch import AttentionShape, Device, mosaic_obstacle
from ..pallas_kernels.float8 import FLOAT8
from ..pallas_kernels.grouped_matmul import mosaic_tiles, tiles_obstacle
from ..pallas_kernels.grouped_matmul.tiles import ROW_CLASSES
from ..pallas_kernels.quantized_matmul import mosaic_obstacle as product_obstacle
from ..pallas_kernels.quantized_matmul.config import TOKEN_CLASSES
from ..pallas_kernels.tuning import FOLDER, write_tuned
from .config import ModelOptions
from .errors import ConfigError
from .find_model import find_model

logger = logging.getLogger(__name__)

CUT_BY_COLUMNS = ("o", "down")
"""Parts of a layer of which several devices have columns, not rows."""


@dataclass(frozen=True)
class TuneOptions:
    """As ``octavo tune`` takes them; the names are those of ``octavo serve``."""

    model: str
    """A preset's name, a folder with a config.json or a GGUF file."""
    quantization: str | None = None
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    """None: both."""
    block_size: int = 16
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class ModelShapes:
    """What of a model the kernels' sizes follow from."""

    decoder: DecoderConfig
    max_model_len: int


def tune(
    options: TuneOptions,
    *,
    output_dir: Path | None = None,
    progress: Callable[[str], None] = logger.info,
    make_measure: Callable[[Task], Measure] = lambda task: task.measure,
) -> list[Path]:
    """Sweeps the kernels of one device's share of the model; the files that were written.

    ``output_dir`` None: the package's own folder. A kernel that no candidate serves is told and left out. Raises
    ConfigError where there is no GPU that the kernels run on, for a model they do not serve, and if nothing was
    written.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise ConfigError(f"octavo tune measures on an NVIDIA GPU; JAX runs on {device.platform} here")
    model = model_shapes(options)
    shape = attention_shape(options, model)
    attention = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.dtype)
    if obstacle := mosaic_obstacle(Device.of(device), attention):
        raise ConfigError(f"the attention kernels cannot be tuned: {obstacle}")
    paths: dict[Path, None] = {}
    for task in tasks(options, model):
        progress(task.title)
        try:
            best = sweep(task, _told(make_measure(task), progress))[0]
        except CandidateError as error:
            progress(f"{task.operation}: left out, {error}")
            continue
        progress(f"{task.operation}: best {_line(best)}")
        fields, folder = task.fields(best.config), output_dir or FOLDER
        paths[write_tuned(task.operation, device.device_kind, task.when(), fields, folder)] = None
    if not paths:
        raise ConfigError("no candidate of any kernel can be used")
    return list(paths)


def tasks(options: TuneOptions, model: ModelShapes) -> Iterator[Task]:
    """Attention over each kind of pool, products with packed weights, experts."""
    kinds = {"auto": None, "fp8": FLOAT8.name}
    for kind in kinds if options.kv_cache_dtype is None else (options.kv_cache_dtype,):
        shape = replace(attention_shape(options, model), kv_dtype=kinds[kind])
        for operation in OPERATIONS:
            yield AttentionTask(operation, shape, model.max_model_len)
    yield from _quantized_tasks(options, model.decoder)
    yield from _grouped_tasks(options, model.decoder)


def _quantized_tasks(options: TuneOptions, decoder: DecoderConfig) -> Iterator[Task]:
    """For each shape of packed weights that the kernel serves, on a device's share of them."""
    _, params = abstract_params(decoder, jnp.dtype(options.dtype))
    leaves, _ = jax.tree.flatten_with_path(params["layers"], is_leaf=lambda leaf: isinstance(leaf, IntWeight))
    shares = dict.fromkeys(
        _share(weight, options.tensor_parallel_size, by_columns=any(_name(key) in CUT_BY_COLUMNS for key in path))
        for path, weight in leaves
        if isinstance(weight, IntWeight) and weight.minimum is None
    )
    for task in shares:
        if product_obstacle(task.out_size, task.in_size, task.group_size, options.dtype) is None:
            for num_tokens in TOKEN_CLASSES:
                yield replace(task, num_tokens=num_tokens, dtype=options.dtype)


def _name(key: Any) -> Any:
    return getattr(key, "key", None)


def _share(weight: IntWeight, num_devices: int, *, by_columns: bool) -> QuantizedTask:
    """One device's part of a weight."""
    (out_size, in_size), group_size = weight.shape, weight.group_size
    if by_columns:
        in_size //= num_devices
        group_size = in_size if weight.scale.shape[1] == 1 else group_size
    else:
        out_size //= num_devices
    return QuantizedTask(out_size, in_size, weight.bits, group_size, weight.zero is not None, num_tokens=1)


def _grouped_tasks(options: TuneOptions, decoder: DecoderConfig) -> Iterator[Task]:
    """For each shape of experts that the kernel serves, on a device's share of them."""
    for moe in dict.fromkeys(layer.moe for layer in decoder.layers):
        if moe is None:
            continue
        hidden, ffn = decoder.hidden_size, moe.intermediate_size // options.tensor_parallel_size
        tiles = mosaic_tiles(1, 1, (2 * ffn, hidden))
        shapes = ((hidden, 2 * ffn), (ffn, hidden))
        if not any(tiles_obstacle(*shape, options.dtype, tiles) for shape in shapes):
            for rows in ROW_CLASSES:
                yield GroupedTask(moe.num_experts, hidden, ffn, rows, options.dtype)


def model_shapes(options: TuneOptions) -> ModelShapes:
    """Raises ConfigError for a model that is not there or cannot be shared so."""
    try:
        if options.model in PRESETS:
            config = preset_config(options.model).with_quantization(options.quantization)
        else:
            model = ModelOptions(options.model, load_format="dummy", quantization=options.quantization)
            config = find_model(model).config
        decoder = get_architecture(config.architecture).decoder_config(config)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    size = options.tensor_parallel_size
    if size < 1 or decoder.num_kv_heads % size:
        raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {decoder.num_kv_heads} KV heads")
    return ModelShapes(decoder, config.max_context_tokens)


def attention_shape(options: TuneOptions, model: ModelShapes) -> TuningShape:
    """One device's share of the model's heads."""
    decoder, size = model.decoder, options.tensor_parallel_size
    heads = (decoder.num_heads // size, decoder.num_kv_heads // size)
    return TuningShape(*heads, decoder.head_dim, options.block_size, options.dtype)


def _told(measure: Measure, progress: Callable[[str], None]) -> Measure:
    """The same, with a line for each candidate."""

    def call(config: object) -> tuple[float, ...]:
        try:
            seconds = measure(config)
        except Exception as error:
            progress(_line(Trial(config, None, f"{type(error).__name__}: {error}")))
            raise
        progress(_line(Trial(config, seconds)))
        return seconds

    return call


def _line(trial: Trial) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in trial.as_dict()["config"].items())
    if trial.seconds is None:
        return f"{sizes}: left out, {trial.error}"
    return f"{sizes}: " + ", ".join(f"{seconds * 1e6:.1f} us" for seconds in trial.seconds)
