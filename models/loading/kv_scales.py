"""The scales of a float8 KV cache that some checkpoints carry: in each layer one for the keys and one for the values.

A number in the cache times its scale is the key's or value's number. Where the scales are and what they are called
follows compressed-tensors, ModelOpt and AutoFP8, with the names under which vLLM knows them.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import jax
import numpy as np

from ..architectures.base import Architecture
from .errors import LoadError
from .safetensors_source import SafetensorsSource
from .source import TensorInfo, WeightSource
from .targets import Target

logger = logging.getLogger(__name__)

_SUFFIX = ".attention.kv_scales"
_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale"),
    "kv": ("kv_scale", "attn.kv_scale"),
}
"""Below a layer's attention. "kv" is an old form: one for both."""
_USED = [name for names in _NAMES.values() for name in names]
_UNUSED = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale", "prob_output_scale")
"""Of attention computed in float8, which this is not."""


def split_off_kv_scales(targets: Mapping[str, Target]) -> tuple[dict[str, Target], dict[str, Target]]:
    """The parameters that are KV scales, and the others."""
    scales = {name: target for name, target in targets.items() if name.endswith(_SUFFIX)}
    return scales, {name: target for name, target in targets.items() if name not in scales}


def kv_scale_pattern(architecture: Architecture) -> str:
    """A regular expression (full match) of the scales' names, which may be present whether or not they are used."""
    return _pattern(architecture, [*_USED, *_UNUSED])


def _pattern(architecture: Architecture, names: Iterable[str]) -> str:
    prefix = re.escape(_attention_prefix(architecture)).replace(r"\{\}", r"\d+")
    return prefix + "(?:" + "|".join(map(re.escape, names)) + ")"


def has_kv_scales(path: Path, load_format: str, architecture: Architecture) -> bool:
    """Whether a checkpoint brings scales of keys or values; of GGUF files none does."""
    if load_format != "safetensors":
        return False
    pattern = re.compile(_pattern(architecture, _USED))
    with closing(SafetensorsSource(path)) as source:
        return any(pattern.fullmatch(name) for name in source.tensors)


def read_kv_scales(
    source: WeightSource, architecture: Architecture, targets: Mapping[str, Target]
) -> dict[str, jax.Array]:
    """f32[2] for each of ``targets``: the layer's scales of keys and values, 1.0 where the checkpoint has none, which
    is said once. Raises LoadError for scales that are not single positive numbers, and for half a pair."""
    arrays, without = {}, []
    for target, (_, sharding) in targets.items():
        layer = int(target.removeprefix("layers.").removesuffix(_SUFFIX))
        pair = _layer_scales(source, _attention_prefix(architecture).format(layer))
        if pair is None:
            without.append(layer)
        arrays[target] = jax.device_put(np.asarray(pair or (1.0, 1.0), np.float32), sharding)
    if without:
        warn_of_absent_scales(len(without), len(targets))
    return arrays


def warn_of_absent_scales(num_without: int, num_layers: int) -> None:
    logger.warning(
        "the checkpoint has no scales for a float8 KV cache in %d of %d layers: 1.0 is used there, which may cost "
        "accuracy",
        num_without,
        num_layers,
    )


def _attention_prefix(architecture: Architecture) -> str:
    """What the names of a layer's attention begin with; ``{}`` is the layer."""
    module = architecture.names["qkv"][0].rpartition(".")[0]
    return architecture.layer_prefix + (module + "." if module else "")


def _layer_scales(source: WeightSource, prefix: str) -> tuple[float, float] | None:
    found = {kind: next(_present(source, prefix, names), None) for kind, names in _NAMES.items()}
    k, v, joint = (found[kind] for kind in ("k", "v", "kv"))
    if joint is not None and k is None and v is None:
        k = v = joint
    if k is None and v is None:
        return None
    if k is None or v is None:
        there = k or v
        assert there is not None
        raise LoadError("a layer has a scale of keys or of values but not both", file=there.file, tensor=there.name)
    return _read_scale(source, k), _read_scale(source, v)


def _present(source: WeightSource, prefix: str, names: tuple[str, ...]) -> Iterator[TensorInfo]:
    return (source.tensors[prefix + name] for name in names if prefix + name in source.tensors)


def _read_scale(source: WeightSource, info: TensorInfo) -> float:
    if info.shape not in ((), (1,)):
        raise LoadError("scales of the KV cache", file=info.file, tensor=info.name, expected="one", found=info.shape)
    source.check_readable(info.name)
    out = np.empty(1, np.float32)
    source.read_rows(info.name, 0, 1, out)
    if not (np.isfinite(out[0]) and out[0] > 0):
        raise LoadError("scale", file=info.file, tensor=info.name, expected="a positive number", found=float(out[0]))
    return float(out[0])
