"""``octavo tune``: measures the sizes of the attention kernels on the GPU at hand and writes them down."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from ..models.architectures import get_architecture
from ..models.errors import ModelConfigError
from ..models.presets import PRESETS, preset_config
from ..pallas_kernels.autotune import (
    OPERATIONS,
    CandidateError,
    GpuMeasure,
    Measure,
    Rows,
    Trial,
    TuningShape,
    sweep,
    workloads,
)
from ..pallas_kernels.dispatch import AttentionShape, Device, mosaic_obstacle
from ..pallas_kernels.tuning import FOLDER, write_tuned
from .config import ModelOptions
from .errors import ConfigError
from .find_model import find_model

logger = logging.getLogger(__name__)

MakeMeasure = Callable[[str, TuningShape, Sequence[Rows]], Measure]


def tune(
    model: str,
    *,
    block_size: int = 16,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    output_dir: Path | None = None,
    progress: Callable[[str], None] = logger.info,
    make_measure: MakeMeasure = GpuMeasure,
) -> list[Path]:
    """Sweeps both kernels for one device's share of the model's heads; the files that were written.

    ``model``: a preset's name, a folder with a config.json or a GGUF file. ``output_dir`` None: the package's own
    folder. Raises ConfigError where there is no GPU that the kernels run on, and for a model they do not serve.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise ConfigError(f"octavo tune measures on an NVIDIA GPU; JAX runs on {device.platform} here")
    shape, max_model_len = model_shape(model, block_size, dtype, tensor_parallel_size)
    attention = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    if obstacle := mosaic_obstacle(Device.of(device), attention):
        raise ConfigError(f"the attention kernels cannot be tuned: {obstacle}")
    paths = []
    for operation in OPERATIONS:
        cases = workloads(operation, max_model_len)
        progress(f"{operation}: {', '.join(cases)}")
        try:
            trials = sweep(operation, shape, _told(make_measure(operation, shape, tuple(cases.values())), progress))
        except CandidateError as error:
            raise ConfigError(str(error)) from error
        best = trials[0]
        progress(f"{operation}: best {_line(best)}")
        folder, when = output_dir or FOLDER, shape.when()
        paths.append(write_tuned(operation, device.device_kind, when, asdict(best.config), folder))
    return paths


def model_shape(model: str, block_size: int, dtype: str, tensor_parallel_size: int) -> tuple[TuningShape, int]:
    """One device's share of the model's heads, and the model's context. Raises ConfigError."""
    try:
        if model in PRESETS:
            config = preset_config(model)
        else:
            config = find_model(ModelOptions(model, load_format="dummy")).config
        decoder = get_architecture(config.architecture).decoder_config(config)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    if tensor_parallel_size < 1 or decoder.num_kv_heads % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the model's {decoder.num_kv_heads} KV heads"
        )
    heads, kv_heads = decoder.num_heads // tensor_parallel_size, decoder.num_kv_heads // tensor_parallel_size
    return TuningShape(heads, kv_heads, decoder.head_dim, block_size, dtype), config.max_context_tokens


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
