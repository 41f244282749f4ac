"""The one reader of a checkpoint's config.json and generation_config.json. No jax here: API processes read it too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .architectures import get_architecture
from .decoder_config import Activation, RopeSpec
from .errors import ModelConfigError
from .quantization.methods import QuantizationMethod, choose_method, read_method
from .rope_config import EVERY_LAYER, read_ropes

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config key → SamplingParams field."""
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": None}
"""Where GPTQ, AWQ and ModelOpt checkpoints describe themselves when config.json does not."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_OUTER_KEYS = (
    "architectures",
    "quantization_config",
    "compression_config",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
)
"""Keys that may stand beside ``text_config`` and still concern the text model."""


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, typed and with its many spellings made one. A null equals an absent key."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    max_position_embeddings: int
    """Context in tokens as written, before any stretching by rope."""
    dtype: str | None
    """Of the stored weights: float32, bfloat16, float16, or None when not said."""
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    ropes: Mapping[str, RopeSpec | None]
    """Layer type → rope; the key ``*`` when all layers share one."""
    layer_types: tuple[str, ...] | None
    sliding_window: int | None
    """Tokens; None also when ``use_sliding_window`` is false."""
    max_window_layers: int
    """Without ``layer_types``, layers from this one on have the window (Qwen2)."""
    eos_token_ids: tuple[int, ...]
    """Union of config.json's and generation_config.json's, in that order."""
    bos_token_id: int | None
    sampling_defaults: Mapping[str, float | int]
    """generation_config.json's sampling values, by their SamplingParams names."""
    quantization: QuantizationMethod | None
    """How the checkpoint is quantised, or is to be while it is loaded; None: not at all."""
    raw: Mapping[str, Any]
    """The flattened config.json without nulls, with the architecture's defaults filled in."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Reads a parsed config.json, nested ``text_config`` included.

        Raises ModelConfigError, naming the key, for whatever is missing, malformed, unknown or unsupported.
        """
        flat = flatten_config(raw)
        architecture = _architecture_name(flat)
        family = get_architecture(architecture)
        values = {**family.defaults, **{family.config_keys.get(key, key): value for key, value in flat.items()}}
        hidden, num_heads = _integer(values, "hidden_size"), _integer(values, "num_attention_heads")
        head_dim = _integer(values, "head_dim", hidden // num_heads)
        generation = _without_nulls(generation_config or {})
        num_layers = _integer(values, "num_hidden_layers")
        return cls(
            architecture=architecture,
            model_type=str(values.get("model_type", "")),
            vocab_size=_integer(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size", family.ffn_factor and family.ffn_factor * hidden),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            norm_eps=_positive(values, "rms_norm_eps", 1e-6),
            activation=_activation(values),
            max_position_embeddings=_integer(values, "max_position_embeddings"),
            dtype=_dtype(values),
            tie_word_embeddings=_boolean(values, "tie_word_embeddings", False),
            attention_bias=_boolean(values, "attention_bias", False),
            mlp_bias=_boolean(values, "mlp_bias", False),
            ropes=read_ropes(values, head_dim),
            layer_types=_layer_types(values, num_layers),
            sliding_window=_sliding_window(values),
            max_window_layers=_integer(values, "max_window_layers", 0, low=0),
            eos_token_ids=_token_ids(values.get("eos_token_id"), generation.get("eos_token_id")),
            bos_token_id=next(iter(_token_ids(values.get("bos_token_id"), generation.get("bos_token_id"))), None),
            sampling_defaults={ours: generation[key] for key, ours in SAMPLING_KEYS.items() if key in generation},
            quantization=read_method(values.get("quantization_config", values.get("compression_config"))),
            raw=values,
        )

    @classmethod
    def from_folder(cls, path: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Reads ``config.json`` and, where present, ``generation_config.json`` of a checkpoint's folder.

        ``hf_overrides`` goes over config.json; objects merge key by key. A null in it removes a key.
        """
        folder = Path(path)
        raw = flatten_config(_read_json(folder / "config.json"))
        raw = apply_overrides(raw, hf_overrides)
        generation = folder / "generation_config.json"
        if not raw.get("quantization_config", raw.get("compression_config")):
            raw = {**raw, **_separate_quantization(folder)}
        return cls.from_dict(raw, _read_json(generation) if generation.exists() else None)

    def with_quantization(self, asked: str | None, gguf_types: Mapping[str, str] | None = None) -> "ModelConfig":
        """As ``--quantization`` asks, see ``quantization.methods.choose_method``."""
        return replace(self, quantization=choose_method(asked, self.quantization, gguf_types))

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence the checkpoint is made for, stretching by rope included."""
        rope = self.ropes.get(EVERY_LAYER)
        stretched = get_architecture(self.architecture).context_includes_rope
        if stretched or rope is None or rope.kind in ("default", "llama3"):
            return self.max_position_embeddings
        base = rope.original_max_position if rope.kind == "yarn" else self.max_position_embeddings
        return max(self.max_position_embeddings, int(base * rope.factor))

    def number(self, key: str, default: float) -> float:
        """A positive number that only some architectures have."""
        return _positive(self.raw, key, default)

    def integer(self, key: str, default: int) -> int:
        """A positive integer that only some architectures have."""
        return _integer(self.raw, key, default)

    def boolean(self, key: str, default: bool) -> bool:
        """A switch that only some architectures have."""
        return _boolean(self.raw, key, default)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None when it is absent."""
        return None if key not in self.raw else _positive(self.raw, key, 0.0)

    def rope_of(self, layer: int) -> RopeSpec | None:
        """The rope of one layer."""
        if EVERY_LAYER in self.ropes:
            return self.ropes[EVERY_LAYER]
        layer_type = self.layer_types[layer] if self.layer_types else _FULL
        if layer_type not in self.ropes:
            raise ModelConfigError(f"rope_parameters has no entry for layer type {layer_type!r} (layer {layer})")
        return self.ropes[layer_type]

    def windows(self, *, all_sliding: bool = False) -> tuple[int | None, ...]:
        """Each layer's window in tokens or None: by ``layer_types``, else from ``max_window_layers`` on or in all."""
        if self.layer_types is not None:
            if _SLIDING in self.layer_types and self.sliding_window is None:
                raise ModelConfigError("layer_types names sliding_attention but sliding_window is not given")
            return tuple(self.sliding_window if kind == _SLIDING else None for kind in self.layer_types)
        first = 0 if all_sliding else self.max_window_layers
        return tuple(self.sliding_window if layer >= first else None for layer in range(self.num_layers))


def flatten_config(raw: Mapping[str, Any], *, keep_nulls: bool = False) -> dict[str, Any]:
    """The text model's keys in one level: ``text_config``'s own, then what stands beside it."""
    if not isinstance(raw, Mapping):
        raise ModelConfigError(f"config.json must hold an object, got {type(raw).__name__}")
    outer = dict(raw) if keep_nulls else _without_nulls(raw)
    text = outer.pop("text_config", None)
    if text is None:
        return outer
    if not isinstance(text, Mapping):
        raise ModelConfigError(f"text_config must be an object, got {text!r}")
    inner = dict(text) if keep_nulls else _without_nulls(text)
    beside = {key: outer[key] for key in _OUTER_KEYS if key in outer}
    # The outer name says what the checkpoint is; the inner one only what its text half would be alone.
    names = {"architectures": beside["architectures"]} if beside.get("architectures") else {}
    return {**beside, **inner, **names}


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def apply_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``raw`` with ``overrides`` put over it; objects merge key by key, and a null removes a key."""
    return _merge(raw, flatten_config(overrides or {}, keep_nulls=True))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(f"{path} must hold a JSON object")
    return parsed


def _architecture_name(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list | tuple) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelConfigError(f"architectures must hold one name, got {names!r}")
    return names[0]


def _separate_quantization(folder: Path) -> dict[str, Any]:
    """``quantization_config`` from the file that GPTQ and AWQ checkpoints used to have instead."""
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).exists():
            if method is None:
                raise ModelConfigError(f"{folder} has {name}: ModelOpt's checkpoints are not supported")
            found = {"quant_method": method, **_read_json(folder / name)}
            read_method(found, str(folder / name))
            return {"quantization_config": found}
    return {}


def _integer(values: Mapping[str, Any], name: str, default: int | None = None, *, low: int = 1) -> int:
    value = values.get(name, default)
    if value is None:
        raise ModelConfigError(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ModelConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
    return value


def _positive(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _boolean(values: Mapping[str, Any], name: str, default: bool) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise ModelConfigError(f"{name} must be true or false, got {value!r}")
    return value


def _activation(values: Mapping[str, Any]) -> Activation:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelConfigError(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype", values.get("torch_dtype"))
    if name is None or name == "auto":
        return None
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelConfigError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _layer_types(values: Mapping[str, Any], num_layers: int) -> tuple[str, ...] | None:
    types = values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise ModelConfigError(f"layer_types must name each of {num_layers} layers, got {types!r}")
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise ModelConfigError(f"layer type {kind!r} is not supported; supported: {_FULL}, {_SLIDING}")
    return tuple(types)


def _sliding_window(values: Mapping[str, Any]) -> int | None:
    if not _boolean(values, "use_sliding_window", True) or values.get("sliding_window") is None:
        return None
    return _integer(values, "sliding_window")


def _token_ids(*found: Any) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in found:
        for token_id in value if isinstance(value, list | tuple) else () if value is None else (value,):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelConfigError(f"token ids must be non-negative integers, got {token_id!r}")
            ids[token_id] = None
    return tuple(ids)


__all__ = ["SAMPLING_KEYS", "ModelConfig", "ModelConfigError", "flatten_config"]
