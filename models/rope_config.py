"""Reads the rotary embedding out of config.json, in the spellings of transformers 4 and 5."""

import math
from collections.abc import Mapping
from typing import Any

from .decoder_config import ROPE_KINDS, RopeSpec
from .errors import ModelConfigError

DEFAULT_THETA = 10_000.0
EVERY_LAYER = "*"
"""Key of the one rope of a model whose layers do not differ."""

_KNOWN_KEYS = {
    "rope_theta",
    "rope_type",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "finetuned",
}
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}


def read_ropes(raw: Mapping[str, Any], head_dim: int) -> dict[str, RopeSpec | None]:
    """Layer type → rope; one entry under ``EVERY_LAYER`` when the layers do not differ.

    ``raw`` is config.json without nulls. ``rope_scaling`` (v4) goes over ``rope_parameters`` (v5), and what
    stands beside them (``rope_theta``, ``partial_rotary_factor``) fills gaps. A null below a layer type means
    no rope there. Raises ModelConfigError for an unknown type or key, or a missing number.
    """
    scaling = _mapping(raw, "rope_scaling")
    parameters = _mapping(raw, "rope_parameters")
    nested = [key for key in parameters if key in _LAYER_TYPES]
    if not nested:
        return {EVERY_LAYER: _read_one({**parameters, **scaling}, raw, head_dim)}
    if scaling:
        raise ModelConfigError("rope_scaling beside rope_parameters per layer type: say which layers it is for")
    unknown = sorted(set(parameters) - set(nested) - _KNOWN_KEYS)
    if unknown:
        raise ModelConfigError(f"rope_parameters: unknown keys {unknown}")
    shared = {key: value for key, value in parameters.items() if key not in nested}
    ropes: dict[str, RopeSpec | None] = {}
    for layer_type in nested:
        own = parameters[layer_type]
        if own is not None and not isinstance(own, Mapping):
            raise ModelConfigError(f"rope_parameters of {layer_type} must be an object, got {own!r}")
        ropes[layer_type] = None if own is None else _read_one({**shared, **_one_spelling(own)}, raw, head_dim)
    return ropes


def _mapping(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"{name} must be an object, got {value!r}")
    return _one_spelling(value)


def _one_spelling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, and ``type`` renamed to ``rope_type`` where only the old name is given."""
    values = {key: value for key, value in parameters.items() if value is not None or key in _LAYER_TYPES}
    old = values.pop("type", None)
    return values if old is None else {"rope_type": old, **values}


def _read_one(values: dict[str, Any], raw: Mapping[str, Any], head_dim: int) -> RopeSpec:
    kind = values.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ModelConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    unknown = sorted(set(values) - _KNOWN_KEYS)
    if unknown:
        raise ModelConfigError(f"rope parameters hold unknown keys {unknown} (type {kind!r})")
    if values.get("finetuned") and kind == "yarn":
        raise ModelConfigError("rope parameter 'finetuned' of yarn is not supported")
    theta = _number(values, "rope_theta", raw.get("rope_theta", DEFAULT_THETA))
    partial = _number(values, "partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    max_position = raw.get("max_position_embeddings", 0)
    original = raw.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    if original:
        original = _number({"original_max_position_embeddings": original}, "original_max_position_embeddings", 0.0)
    if kind == "yarn" and "factor" not in values and original:
        values["factor"] = max_position / original
    if "factor" not in values:
        raise ModelConfigError(f"rope type {kind!r} needs factor")
    factor = _number(values, "factor", 1.0)
    if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= values.keys():
        raise ModelConfigError("rope type 'llama3' needs low_freq_factor and high_freq_factor")
    return RopeSpec(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position=0
        if kind == "linear"
        else int(max_position if kind == "dynamic" else original or max_position),
        low_freq_factor=_number(values, "low_freq_factor", 1.0),
        high_freq_factor=_number(values, "high_freq_factor", 4.0),
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor) if kind == "yarn" else 1.0,
    )


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelConfigError(f"rope parameter {name} must be a positive number, got {value!r}")
    return float(value)


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin: given, or from mscale over mscale_all_dim, or 0.1 ln(factor) + 1."""
    if "attention_factor" in values:
        return _number(values, "attention_factor", 1.0)

    def mscale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

    above, below = values.get("mscale"), values.get("mscale_all_dim")
    if above and below:
        return mscale(_number(values, "mscale", 1.0)) / mscale(_number(values, "mscale_all_dim", 1.0))
    return mscale(1.0)
