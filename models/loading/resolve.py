"""From what a user calls a model to its files and configuration. No jax here: API processes do this too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..config import ModelConfig, apply_overrides
from .default_model import require_default_model
from .errors import LoadError, name_list
from .gguf_config import gguf_config
from .gguf_file import GGUFFile
from .gguf_source import weight_types
from .hub import fetch_model
from .orbax_index import check_files, is_converted, read_index, refuse_foreign
from .safetensors_source import checkpoint_files

WeightFormat = Literal["safetensors", "gguf", "orbax", "dummy"]
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is on this machine."""

    path: Path
    """A folder with config.json, or a .gguf file."""
    format: WeightFormat
    config: ModelConfig


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> ResolvedModel:
    """Finds (or downloads) a model and reads its configuration; None means the embedded default.

    ``load_format`` is one of ``LOAD_FORMATS``; auto goes by the files. ``quantization`` is the name of a method; None
    is the checkpoint's own. ``hf_overrides`` go over the configuration, objects merged key by key. Raises LoadError
    for files, ModelConfigError for the configuration.
    """
    if load_format not in LOAD_FORMATS:
        raise LoadError("load format", expected=" or ".join(LOAD_FORMATS), found=repr(load_format))
    with_weights = load_format != "dummy"
    if model is None:
        path = require_default_model()
    else:
        path = fetch_model(model, revision=revision, download_dir=download_dir, with_weights=with_weights)
    path = _gguf_in(path) or path
    found: WeightFormat = "gguf" if path.is_file() else "orbax" if is_converted(path) else "safetensors"
    if path.is_file() and path.suffix != ".gguf":
        raise LoadError("a model is a folder or a .gguf file", file=path)
    if path.is_dir():
        refuse_foreign(path)
    if load_format not in ("auto", "dummy", found):
        raise LoadError("load format", file=path, expected=load_format, found=found)
    if found == "safetensors" and with_weights:
        checkpoint_files(path)  # refuses early, before anything is built on the configuration
    if found == "orbax":
        config = _read_converted(path, hf_overrides, quantization, with_weights=with_weights)
    else:
        config = _read_config(path, hf_overrides, quantization)
    return ResolvedModel(path, found if with_weights else "dummy", config)


def _gguf_in(path: Path) -> Path | None:
    """The one GGUF file of a folder that holds no Hugging Face model."""
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = name_list(file.name for file in files)
        raise LoadError(f"holds several GGUF files ({names}); name the one to load", file=path)
    return files[0] if files else None


def _read_converted(
    path: Path, hf_overrides: Mapping[str, Any] | None, quantization: str | None, *, with_weights: bool
) -> ModelConfig:
    """The configuration with the weights' forms as they were stored, which are the ones that can be asked for."""
    index = read_index(path)
    if with_weights:
        check_files(path, index)
    if quantization is not None and index.quantization is None:
        raise LoadError(
            f"quantization {quantization!r} was asked for, but the weights are stored plain; "
            f"convert the original model with --quantization {quantization}",
            file=path,
        )
    config = replace(ModelConfig.from_folder(path, hf_overrides), quantization=index.quantization)
    return config.with_quantization(quantization)


def _read_config(path: Path, hf_overrides: Mapping[str, Any] | None, quantization: str | None) -> ModelConfig:
    if path.is_dir():
        return ModelConfig.from_folder(path, hf_overrides).with_quantization(quantization)
    file = GGUFFile(path)
    try:
        config = ModelConfig.from_dict(apply_overrides(gguf_config(file), hf_overrides))
        return config.with_quantization(quantization, weight_types(file))
    finally:
        file.close()
