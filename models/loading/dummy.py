"""Random weights for tests and benchmarks of speed: the shapes of a model without its files."""

import re
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ..decoder_config import DecoderConfig
from .targets import param_targets

_STD = 0.02
_SCALE = 0.004


def dummy_params(config: DecoderConfig, *, dtype: jax.typing.DTypeLike, mesh: Mesh) -> Any:
    """All parameters of a decoder, as ``loader.load_params`` returns them; needs no reader of any file format."""
    targets, treedef = param_targets(config, dtype, mesh)
    unit = 0.0 if config.norm_plus_one else 1.0
    return treedef.unflatten([dummy_array(name, *target, norm_weight=unit) for name, target in targets.items()])


def dummy_array(name: str, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, *, norm_weight: float) -> jax.Array:
    """Normal with standard deviation 0.02, made on the device; ``norm_weight`` throughout where ``name`` is a norm, 0
    where it is a norm's bias, 1 where it is a layer's KV scales. Quantised weights have random codes, and a scale that
    gives about the same deviation.

    The values follow from ``name`` alone: the same in every process and under every sharding.
    """
    if "norm" in name or name.endswith("kv_scales"):
        value = 0.0 if name.endswith("bias") else norm_weight if "norm" in name else 1.0
        return jax.device_put(jnp.full(leaf.shape, value, leaf.dtype), sharding)
    if name.endswith((".weight.scale", ".input_scale")) or re.search(r"\.parts\.\d+\.scale$", name):
        return jax.device_put(jnp.full(leaf.shape, _SCALE, leaf.dtype), sharding)
    if name.endswith(".permutation"):
        return jax.device_put(jnp.arange(leaf.shape[0], dtype=leaf.dtype), sharding)
    return _generator(leaf.shape, jnp.dtype(leaf.dtype), sharding)(jax.random.key(zlib.crc32(name.encode())))


@cache
def _generator(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """One compiled program for all layers' weights of a shape."""

    def generate(key: jax.Array) -> jax.Array:
        if dtype == jnp.int32:  # packed codes
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), dtype)
        if dtype == jnp.float8_e4m3fn:
            return (_STD / _SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        return (_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(generate, out_shardings=sharding)
