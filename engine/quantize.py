"""``octavo quantize``: a plain checkpoint to a quantised one, AWQ, GPTQ or FP8, that other programs can load too."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from ..models.architectures import get_architecture
from ..models.architectures.base import Architecture, WeightMapping
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelConfigError
from ..models.loading.errors import LoadError, name_list
from ..models.loading.kv_scales import has_kv_scales
from ..models.loading.resolve import ResolvedModel
from ..models.loading.safetensors_source import SafetensorsSource
from ..models.loading.safetensors_writer import SafetensorsWriter
from ..models.quantization.activation_aware import folds
from ..models.quantization.rounding import IntegerGrid
from .calibration import LayerRunner, Samples
from .config import ModelOptions
from .errors import ConfigError
from .find_model import find_model
from .launch import backend_is_up
from .model_folder import check_output, copy_texts, left_over, written_aside
from .quantize_layers import AwqMethod, Fp8Method, GptqMethod, LayerWeights, Method, QuantizedLayer
from .tokenizer import Tokenizer

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class QuantizeOptions:
    """What to make. ``samples`` None: each weight to the nearest code, without calibration (fp8 never has any)."""

    method: Literal["awq", "gptq", "fp8"]
    samples: Samples | None = None
    bits: int = 4
    group_size: int | None = 128
    """None: a whole row's columns."""
    symmetric: bool = True
    """GPTQ only."""
    damping: float = 0.01
    per_channel: bool = True
    """FP8 only."""


@dataclass(frozen=True)
class Quantized:
    """What was written."""

    folder: Path
    num_linears: int
    num_layers: int
    bytes_before: int
    """Of all tensors."""
    bytes_after: int


def quantize(
    model: ModelOptions,
    options: QuantizeOptions,
    output: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> Quantized:
    """Writes the plain safetensors model that ``model`` names into the new folder ``output``, quantised.

    Every linear layer of the decoder's layers is; embeddings, norms and the output layer are copied. Runs on the CPU,
    one layer after the other. The folder appears when it is complete. Raises ConfigError for a model that is not plain
    or that the method does not fit, for a bad calibration file, and for an ``output`` in use.
    """
    check_output(output)
    if stale := left_over(output):
        progress(f"left over from runs that were killed, or still in use: {', '.join(map(str, stale))}")
    if not backend_is_up():
        jax.config.update("jax_platforms", "cpu")  # nothing here may take a GPU that is in use
    resolved = find_model(model)
    try:
        architecture = get_architecture(resolved.config.architecture)
        decoder = _check_plain(resolved, architecture)
        with closing(SafetensorsSource(resolved.path)) as source, written_aside(output) as folder:
            work = _Work(source, architecture, decoder, options)
            if (
                options.method == "awq"
                and options.samples
                and has_kv_scales(resolved.path, "safetensors", architecture)
            ):
                raise ConfigError("the checkpoint has scales of an FP8 KV cache, which awq would make wrong")
            copy_texts(resolved.path, folder)
            writer = SafetensorsWriter(folder)
            work.write(writer, resolved.path, progress)
            writer.close()
            _write_config(folder, work.method.config())
    except (LoadError, ModelConfigError) as error:
        raise ConfigError(str(error)) from error
    before = sum(info.num_bytes for info in source.tensors.values())
    return Quantized(output, work.num_linears, decoder.num_layers, before, writer.num_bytes)


def _check_plain(resolved: ResolvedModel, architecture: Architecture) -> DecoderConfig:
    if resolved.config.quantization is not None:
        raise ConfigError(
            f"{resolved.path} is quantised already ({resolved.config.quantization.name}); give the plain checkpoint"
        )
    if resolved.format != "safetensors":
        raise ConfigError(f"{resolved.path} is of format {resolved.format}; octavo quantize reads plain safetensors")
    decoder = architecture.decoder_config(resolved.config)
    if any(layer.moe is not None for layer in decoder.layers):
        raise ConfigError(f"{architecture.name}: octavo quantize does not make quantised mixtures of experts")
    if architecture.transposed:
        raise ConfigError(f"{architecture.name} is served unquantised only")
    return decoder


def _write_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n", encoding="utf-8")


class _Work:
    """One checkpoint on its way."""

    def __init__(
        self, source: SafetensorsSource, architecture: Architecture, decoder: DecoderConfig, options: QuantizeOptions
    ) -> None:
        self.source, self.architecture, self.decoder = source, architecture, decoder
        self.samples = options.samples
        self.method = _method(options, architecture, decoder)
        self.mappings = architecture.as_named(architecture.weight_mappings(decoder), source.tensors)
        self._check_tensors()
        if options.method == "awq" and options.samples is not None:
            folds(decoder, architecture.names, "")  # refuses early
        self.linears = [LayerWeights.names(self.mappings, layer) for layer in range(decoder.num_layers)]
        names = [name for layer in self.linears for part in layer.values() for name in part]
        for name in names:
            out_size, in_size = source.tensors[f"{name}.weight"].shape
            self.method.check(name, (out_size, in_size))
        self.num_linears = len(names)

    def _check_tensors(self) -> None:
        wanted = {name: shape for m in self.mappings for name, shape in zip(m.sources, m.shapes, strict=True)}
        if missing := wanted.keys() - self.source.tensors.keys():
            raise LoadError(f"the checkpoint lacks {len(missing)} tensors: {name_list(missing)}")
        for name, shape in wanted.items():
            info = self.source.tensors[name]
            if info.shape != shape:
                raise LoadError("shape", file=info.file, tensor=name, expected=shape, found=info.shape)
            self.source.check_readable(name)

    def write(self, writer: SafetensorsWriter, path: Path, progress: Callable[[str], None]) -> None:
        """Every tensor of the checkpoint, quantised or as it was."""
        runner, hidden = None, np.empty(0, np.float32)
        if self.method.calibrated:
            assert self.samples is not None
            ids = self.samples.read(Tokenizer.load(path))
            runner, hidden = LayerRunner(self.decoder, self.samples.length), self._embed(ids)
        done: set[str] = set()
        for index in range(self.decoder.num_layers):
            progress(f"layer {index + 1} of {self.decoder.num_layers}")
            weights = self._read_layer(index)
            made, hidden = self._quantize_layer(index, weights, runner, hidden)
            done.update(f"{name}.weight" for part in weights.linears.values() for name in part)
            done.update(made.written)
            for name, array in made.written.items():
                writer.add(name, array)
        for name in self.source.tensors:
            if name not in done:
                writer.add(name, self.source.raw(name))

    def _quantize_layer(
        self, index: int, weights: LayerWeights, runner: LayerRunner | None, hidden: np.ndarray
    ) -> tuple[QuantizedLayer, np.ndarray]:
        """What is written of a layer; the hidden states after it, as it is then."""
        prefix = self.architecture.layer_prefix.format(index)
        if runner is None:
            return self.method.quantize(weights, {}, prefix), hidden
        layer, plain = self.decoder.layers[index], dict(weights.plain)
        inputs = runner.inputs(layer, self._params(index, plain), hidden)
        for part, seen in inputs.items():
            if not (np.isfinite(seen.moments).all() and np.isfinite(seen.magnitudes).all()):
                raise ConfigError(f"layer {index}: calibration inputs of {part} are not finite")
        try:
            made = self.method.quantize(weights, inputs, prefix)
        except ValueError as error:
            raise ConfigError(f"layer {index}: {error}") from error
        after = runner.outputs(layer, self._params(index, {**plain, **made.plain}), hidden)
        return made, after

    def _layer_mappings(self, index: int) -> list[WeightMapping]:
        return [mapping for mapping in self.mappings if mapping.target.startswith(f"layers.{index}.")]

    def _read_layer(self, index: int) -> LayerWeights:
        plain = {name: self._read(name) for mapping in self._layer_mappings(index) for name in mapping.sources}
        linears = self.linears[index]
        weights = {f"{name}.weight" for part in linears.values() for name in part}
        return LayerWeights(linears, plain, {name: self.source.raw(name) for name in plain.keys() - weights})

    def _read(self, name: str) -> np.ndarray:
        info = self.source.tensors[name]
        values = np.empty(info.shape, np.float32)
        self.source.read_rows(name, 0, info.shape[0], values)
        if not np.isfinite(values).all():
            raise LoadError("holds numbers that are not finite", file=info.file, tensor=name)
        return values

    def _params(self, index: int, plain: dict[str, np.ndarray]) -> dict[str, Any]:
        """One layer's tree, as the decoder has it."""
        tree: dict[str, Any] = {}
        for mapping in self._layer_mappings(index):
            *path, last = mapping.target.split(".")[2:]
            place = tree
            for key in path:
                place = place.setdefault(key, {})
            place[last] = np.concatenate([plain[name] for name in mapping.sources])
        return tree

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        """i32 ``[N, L]`` → f32 ``[N, L, D]``, what the first layer is given."""
        (table,) = self.architecture.names["embed"]
        rows = self.source.tensors[f"{table}.weight"].shape[0]
        if ids.max() >= rows:
            raise ConfigError(f"the tokenizer makes token {ids.max()} of the text, but {table} has {rows} rows")
        hidden = np.asarray(self.source.raw(f"{table}.weight")[ids], np.float32) * self.decoder.embedding_multiplier
        if self.decoder.learned_positions is not None:
            (table,) = self.architecture.names["positions"]
            hidden = hidden + np.asarray(self.source.raw(f"{table}.weight")[: ids.shape[1]], np.float32)
        return hidden.astype(np.float32)


def _method(options: QuantizeOptions, architecture: Architecture, decoder: DecoderConfig) -> Method:
    calibrated = options.samples is not None
    if options.method == "fp8":
        return Fp8Method(options.per_channel)
    if options.method == "awq":
        return AwqMethod(options.group_size, decoder, architecture, calibrated)
    lowest = 0 if options.symmetric else 1
    grid = IntegerGrid(options.bits, options.group_size, options.symmetric, lowest)
    return GptqMethod(grid, options.damping, calibrated)
