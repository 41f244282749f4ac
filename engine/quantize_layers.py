"""One decoder layer's plain weights made into what a quantised checkpoint holds, by each method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import __version__
from ..models.architectures.base import LINEAR_PARTS, Architecture, WeightMapping
from ..models.decoder_config import DecoderConfig
from ..models.quantization.activation_aware import (
    Fold,
    Inputs,
    fold_norm,
    folds,
    round_with_clipping,
    search_scales,
)
from ..models.quantization.compensation import round_with_compensation
from ..models.quantization.layouts import (
    Tensors,
    awq_config,
    awq_tensors,
    float8_config,
    float8_tensors,
    gptq_config,
    gptq_tensors,
)
from ..models.quantization.rounding import IntegerGrid, Rounded, to_float8
from .errors import ConfigError


@dataclass
class LayerWeights:
    """One layer of a plain checkpoint."""

    linears: Mapping[str, tuple[str, ...]]
    """Part of the decoder ("qkv", …) → names of its linear layers."""
    plain: dict[str, np.ndarray]
    """f32 of every tensor, by name."""
    stored: dict[str, np.ndarray]
    """Tensors that stay plain, as the checkpoint has them: norms, biases."""

    @classmethod
    def names(cls, mappings: Sequence[WeightMapping], layer: int) -> dict[str, tuple[str, ...]]:
        """``linears`` of one layer of a dense decoder, by its mappings: an architecture may name more parts."""
        found = {}
        for mapping in mappings:
            *path, part, last = mapping.target.split(".")
            if path[:2] == ["layers", str(layer)] and part in LINEAR_PARTS and last == "weight":
                found[part] = tuple(name.removesuffix(".weight") for name in mapping.sources)
        return found


@dataclass
class QuantizedLayer:
    """What is written in place of a layer's tensors, and the plain weights that this stands for."""

    written: dict[str, np.ndarray] = field(default_factory=dict)
    plain: dict[str, np.ndarray] = field(default_factory=dict)


class Method(Protocol):
    """How ``octavo quantize`` makes weights."""

    @property
    def calibrated(self) -> bool:
        """``quantize`` needs the layer's inputs."""

    def config(self) -> dict[str, Any]:
        """``quantization_config``."""

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """Raises ConfigError, naming the layer, for a weight ``(out, in)`` that the format cannot hold."""

    def quantize(self, layer: LayerWeights, inputs: Mapping[str, Inputs], prefix: str) -> QuantizedLayer:
        """``inputs`` by part of the decoder; empty if not ``calibrated``. Raises ValueError for bad ones."""


def _check_groups(name: str, in_size: int, group_size: int | None) -> None:
    if group_size is not None and in_size % group_size:
        fits = [size for size in (32, 64, 128) if in_size % size == 0]
        advice = f"; {' and '.join(map(str, fits))} would" if fits else ""
        raise ConfigError(f"{name}: its {in_size} input columns do not divide into groups of {group_size}{advice}")


@dataclass(frozen=True)
class AwqMethod:
    """4 bits with zero points. Calibrated: scaled channels and narrowed ranges; else each weight to the nearest."""

    group_size: int | None
    decoder: DecoderConfig
    architecture: Architecture
    calibrated: bool = True

    @property
    def grid(self) -> IntegerGrid:
        return IntegerGrid(4, self.group_size)

    def config(self) -> dict[str, Any]:
        return awq_config(self.grid)

    def check(self, name: str, shape: tuple[int, int]) -> None:
        _check_groups(name, shape[1], self.group_size)
        if shape[0] % 8:
            raise ConfigError(f"{name}: its {shape[0]} output rows are not a multiple of 8, which AWQ packs")

    def quantize(self, layer: LayerWeights, inputs: Mapping[str, Inputs], prefix: str) -> QuantizedLayer:
        made = QuantizedLayer()
        if self.calibrated:
            inputs = self._fold(layer, inputs, prefix, made)
        for part, names in layer.linears.items():
            for name in names:
                weight = layer.plain[f"{name}.weight"]
                if self.calibrated:
                    rounded = round_with_clipping(weight, inputs[part].moments, self.grid)
                else:
                    rounded = self.grid.nearest(weight)
                _put(made, name, awq_tensors(rounded), rounded.plain())
        return made

    def _fold(
        self, layer: LayerWeights, inputs: Mapping[str, Inputs], prefix: str, made: QuantizedLayer
    ) -> dict[str, Inputs]:
        """Moves scales from producers to consumers, in ``layer.plain``; → the inputs as they are then."""
        found = folds(self.decoder, self.architecture.names, prefix)
        scales = {fold.linear: self._search(layer, inputs[fold.linear], fold) for fold in found}
        after = dict(inputs)
        for fold in found:
            wide = _divide_producer(layer, fold, scales[fold.linear], made)[fold.channels]
            for name in layer.linears[fold.linear]:
                layer.plain[f"{name}.weight"] = layer.plain[f"{name}.weight"] * wide
            after[fold.linear] = inputs[fold.linear].scaled(wide)
        return after

    def _search(self, layer: LayerWeights, inputs: Inputs, fold: Fold) -> np.ndarray:
        weights = [layer.plain[f"{name}.weight"] for name in layer.linears[fold.linear]]
        return search_scales(weights, inputs, fold.channels, self.grid)


def _divide_producer(layer: LayerWeights, fold: Fold, scales: np.ndarray, made: QuantizedLayer) -> np.ndarray:
    """The scales that the producer has really been divided by, which rounding to its type may have changed."""
    main, *others = fold.producers
    if main in layer.stored:
        divided, scales = fold_norm(layer.stored[main], scales, plus_one=fold.plus_one)
        made.written[main], layer.plain[main] = divided, divided.astype(np.float32)
    else:
        layer.plain[main] = layer.plain[main] / scales[:, None]
    for name in others:
        made.written[name] = (layer.plain[name] / scales).astype(layer.stored[name].dtype)
        layer.plain[name] = made.written[name].astype(np.float32)
    made.plain.update({name: layer.plain[name] for name in made.written})
    return scales


@dataclass(frozen=True)
class GptqMethod:
    """4 or 8 bits. Calibrated: errors are compensated by later columns; else each weight to the nearest."""

    grid: IntegerGrid
    damping: float
    calibrated: bool = True

    def config(self) -> dict[str, Any]:
        return gptq_config(self.grid, self.damping, __version__)

    def check(self, name: str, shape: tuple[int, int]) -> None:
        _check_groups(name, shape[1], self.grid.group_size)
        if shape[1] % 32 or shape[0] * self.grid.bits % 32:
            sizes = f"{shape[1]} input columns and {shape[0]} output rows"
            raise ConfigError(f"{name}: {sizes} of {self.grid.bits} bits do not fill whole words, as GPTQ needs")

    def quantize(self, layer: LayerWeights, inputs: Mapping[str, Inputs], prefix: str) -> QuantizedLayer:
        made = QuantizedLayer()
        for part, names in layer.linears.items():
            for name, rounded in zip(names, self._round(layer, inputs, part), strict=True):
                _put(made, name, gptq_tensors(rounded, self.grid.bits), rounded.plain())
        return made

    def _round(self, layer: LayerWeights, inputs: Mapping[str, Inputs], part: str) -> Sequence[Rounded]:
        weights = [layer.plain[f"{name}.weight"] for name in layer.linears[part]]
        if not self.calibrated:
            return [self.grid.nearest(weight) for weight in weights]
        # Layers with the same inputs are rounded together: rows are independent.
        both = round_with_compensation(np.concatenate(weights), inputs[part].moments, self.grid, damping=self.damping)
        ends = np.cumsum([len(weight) for weight in weights])[:-1]
        pieces = (np.split(array, ends) for array in (both.codes, both.scales, both.zeros))
        return [Rounded(*parts) for parts in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Fp8Method:
    """e4m3, with a scale for each output row or one for the whole weight."""

    per_channel: bool
    calibrated: bool = False

    def config(self) -> dict[str, Any]:
        return float8_config(per_channel=self.per_channel)

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """Every weight fits."""

    def quantize(self, layer: LayerWeights, inputs: Mapping[str, Inputs], prefix: str) -> QuantizedLayer:
        made = QuantizedLayer()
        for names in layer.linears.values():
            for name in names:
                codes, scales = to_float8(layer.plain[f"{name}.weight"], per_channel=self.per_channel)
                _put(made, name, float8_tensors(codes, scales), codes.astype(np.float32) * scales)
        return made


def _put(made: QuantizedLayer, name: str, tensors: Tensors, plain: np.ndarray) -> None:
    made.written.update({f"{name}.{suffix}": array for suffix, array in tensors.items()})
    made.plain[f"{name}.weight"] = plain
