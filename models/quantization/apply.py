"""From a checkpoint's method to the decoder's layers. No jax here."""

from collections.abc import Mapping
from dataclasses import replace

from ..decoder_config import DecoderConfig, LayerSpec
from ..errors import ModelConfigError
from .methods import QuantizationMethod

LINEARS = ("qkv", "o", "gate_up", "up", "down")


def with_quantization(
    config: DecoderConfig, method: QuantizationMethod, names: Mapping[str, tuple[str, ...]], layer_prefix: str
) -> DecoderConfig:
    """``config`` with every layer's linears as ``method`` has them; ``names`` are those of ``Architecture``.

    Raises ModelConfigError for a part of the model that is served unquantised only.
    """
    if not config.tie_embeddings and method.weight_spec(names["head"][0]) is not None:
        raise ModelConfigError(
            f"quantization: {names['head'][0]} is quantised ({method.name}); "
            "the output layer is served unquantised only"
        )
    layers = [
        _with_specs(layer, method, names, layer_prefix.format(index)) for index, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


def _with_specs(
    layer: LayerSpec, method: QuantizationMethod, names: Mapping[str, tuple[str, ...]], prefix: str
) -> LayerSpec:
    if layer.moe is not None:
        raise ModelConfigError(
            f"quantization: {prefix}mlp.experts: a mixture of experts is served unquantised only, not as {method.name}"
        )
    found = []
    for linear in LINEARS:
        specs = tuple(method.weight_spec(prefix + module) for module in names.get(linear, ()))
        if any(spec is not None for spec in specs):
            found.append((linear, specs))
    return replace(layer, quantization=tuple(found))
