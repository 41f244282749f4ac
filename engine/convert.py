"""``octavo convert``: a checkpoint of any format to an Orbax checkpoint, which devices restore in shares."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from ..models.architectures import get_architecture
from ..models.architectures.base import Architecture
from ..models.config import ModelConfig
from ..models.errors import ModelConfigError
from ..models.loading.errors import LoadError
from ..models.loading.gguf_config import gguf_config
from ..models.loading.gguf_file import GGUFFile
from ..models.loading.kv_scales import has_kv_scales
from ..models.loading.loader import load_params
from ..models.loading.orbax_checkpoint import STORED_PIECES, save_params
from ..models.loading.orbax_index import PARAMS_FOLDER, OrbaxIndex, StoredQuantization
from ..models.loading.resolve import ResolvedModel
from ..models.quantization.apply import LINEARS
from ..models.quantization.spec import WeightSpec
from .config import ModelOptions
from .errors import ConfigError
from .find_model import find_model
from .launch import backend_is_up, make_cpu_devices, make_mesh
from .model_folder import check_output, copy_texts, left_over, written_aside
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    num_arrays: int
    num_bytes: int


def convert(options: ModelOptions, output: Path, progress: Callable[[str], None] = lambda text: None) -> Converted:
    """Writes the model that ``options`` name into the new folder ``output``: config.json, the tokenizer, parameters.

    Quantised weights keep their form; ``options.quantization`` makes one for plain weights. ``options.dtype`` "auto" is
    what config.json says, else float32. Runs on the CPU and needs host memory for the model as it is stored. The folder
    appears when it is complete. Raises ConfigError for a model that cannot be served and for an ``output`` in use.
    """
    check_output(output)
    if stale := left_over(output):
        progress(f"left over from runs that were killed, or still in use: {', '.join(map(str, stale))}")
    if not backend_is_up():
        jax.config.update("jax_platforms", "cpu")  # nothing here may take a GPU that is in use
        make_cpu_devices(STORED_PIECES)
    resolved = find_model(options)
    try:
        with written_aside(output) as folder:
            _copy_texts(resolved.path, folder)
            progress(f"reading {resolved.path}")
            index = _write_params(resolved, options.dtype, folder, progress)
            index.write(folder)
    except (LoadError, ModelConfigError) as error:
        raise ConfigError(str(error)) from error
    return Converted(output, len(index.arrays), sum(index.files.values()))


def _write_params(resolved: ResolvedModel, dtype: str, folder: Path, progress: Callable[[str], None]) -> OrbaxIndex:
    config = resolved.config
    architecture = get_architecture(config.architecture)
    decoder = architecture.decoder_config(config)
    if resolved.format == "orbax" or has_kv_scales(resolved.path, resolved.format, architecture):
        decoder = replace(decoder, scales_kv=True)
    params = load_params(
        resolved.path,
        architecture,
        decoder,
        dtype=jnp.dtype((config.dtype or "float32") if dtype == "auto" else dtype),
        mesh=make_mesh(1),
        load_format=resolved.format,
        progress=True,
    )
    progress("writing")
    try:
        arrays = save_params(folder, params, architecture, decoder)
    except ValueError as error:
        if "RESOURCE_EXHAUSTED" in str(error):  # how Orbax says that the disk is full
            raise OSError("no space left on device") from error
        raise
    below = folder / PARAMS_FOLDER
    files = {path.relative_to(below).as_posix(): path.stat().st_size for path in below.rglob("*") if path.is_file()}
    return OrbaxIndex(
        architecture.name, arrays, dict(sorted(files.items())), _stored_quantization(config, architecture)
    )


def _stored_quantization(config: ModelConfig, architecture: Architecture) -> StoredQuantization | None:
    """What the method says of every linear layer, since a GGUF file's or an online one's is in no config.json."""
    method = config.quantization
    if method is None:
        return None
    specs: dict[str, WeightSpec] = {}
    for layer in range(config.num_layers):
        prefix = architecture.layer_prefix.format(layer)
        for name in (prefix + name for linear in LINEARS for name in architecture.names.get(linear, ())):
            spec = method.weight_spec(name)
            if spec is not None:
                specs[name] = spec
    return StoredQuantization(method.name, specs)


def _copy_texts(source: Path, folder: Path) -> None:
    """config.json and the tokenizer's files; of a GGUF file, made from what is in it."""
    if source.is_file():
        _write_gguf_texts(source, folder)
    else:
        copy_texts(source, folder)


def _write_gguf_texts(source: Path, folder: Path) -> None:
    tokenizer = Tokenizer.load(source)
    file = GGUFFile(source)
    try:
        config = gguf_config(file)
    finally:
        file.close()
    ends = sorted({*ModelConfig.from_dict(config).eos_token_ids, *tokenizer.eos_token_ids})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8")
    tokenizer.hf.save_pretrained(str(folder))
