"""AWQ: scales for input channels, and narrower ranges, that keep what matters to the activations (Lin et al. 2023).

A channel's weights are multiplied by a number before they are rounded, and whatever produces the channel is divided by
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..decoder_config import DecoderConfig
from ..errors import ModelConfigError
from .rounding import IntegerGrid, Rounded

_EXPONENTS = tuple(step / 20 for step in range(20))
_SHRINKS = tuple(1 - step / 20 for step in range(11))
_LEAST = 1e-4


@dataclass(frozen=True)
class Inputs:
    """What is kept of a linear layer's calibration inputs x."""

    moments: np.ndarray
    """f32 ``[in, in]``: the mean of ``x xᵀ``."""
    magnitudes: np.ndarray
    """f32 ``[in]``: the mean of ``|x|``."""

    def scaled(self, scales: np.ndarray) -> "Inputs":
        """Of ``x / scales``."""
        return Inputs(self.moments / np.outer(scales, scales), self.magnitudes / scales)


@dataclass(frozen=True)
class Fold:
    """A linear layer whose input channels can be scaled without changing what the model computes."""

    linear: str
    """Part of the decoder: "qkv", "o", "gate_up" or "down"."""
    producers: tuple[str, ...]
    """Checkpoint tensors that are divided: of a norm, or the rows of the linear layer before."""
    channels: np.ndarray
    """i64 ``[in]``: the producer's element, or row, that each input column is made of."""
    plus_one: bool = False
    """The producer is a norm that multiplies by ``1 + weight``."""


def folds(config: DecoderConfig, names: Mapping[str, tuple[str, ...]], prefix: str) -> list[Fold]:
    """Of one layer, whose checkpoint names begin with ``prefix``; ``names`` as in ``Architecture``.

    Raises ModelConfigError for a decoder whose parts are not known to allow it.
    """
    fused = len(names["qkv"]) != 3 or len(names.get("gate_up", ())) != 2
    if not config.gated_mlp or config.parallel_block or config.norm_placement == "post" or fused:
        raise ModelConfigError(
            "quantize: awq is for decoders with a norm before attention and before a gated MLP, and with separate q, "
            "k, v, gate and up; use gptq or fp8 for this one"
        )

    def tensors(module: str, *, bias: bool) -> tuple[str, ...]:
        return (f"{prefix}{module}.weight", *((f"{prefix}{module}.bias",) if bias else ()))

    def of_norm(linear: str, norm: str) -> Fold:
        producers = tensors(names[norm][0], bias=config.norm_bias)
        return Fold(linear, producers, np.arange(config.hidden_size), config.norm_plus_one)

    heads = np.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)
    of_v = (heads[:, None] * config.head_dim + np.arange(config.head_dim)).reshape(-1)
    return [
        of_norm("qkv", "attention_norm"),
        Fold("o", tensors(names["qkv"][2], bias=config.qkv_bias), of_v),
        of_norm("gate_up", "mlp_norm"),
        Fold("down", tensors(names["gate_up"][1], bias=config.mlp_bias), np.arange(config.intermediate_size)),
    ]


def search_scales(weights: Sequence[np.ndarray], inputs: Inputs, channels: np.ndarray, grid: IntegerGrid) -> np.ndarray:
    """f32, a scale for each element of the producer: the best of a grid of exponents of the channels' magnitudes.

    ``weights`` f32 ``[out, in]`` share the inputs. Best is the least squared error of the product with the inputs.
    """
    weight, moments = jnp.asarray(np.concatenate(weights)), jnp.asarray(inputs.moments)
    count = np.bincount(channels)
    magnitudes = np.maximum(np.bincount(channels, inputs.magnitudes) / count, _LEAST)
    best, least = np.ones(len(count), np.float32), np.inf
    for exponent in _EXPONENTS:
        scales = magnitudes**exponent
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        error = float(_scaled_error(grid, weight, moments, scales[channels]))
        if error < least:
            best, least = scales, error
    return best


@partial(jax.jit, static_argnums=0)
def _scaled_error(grid: IntegerGrid, weight: jax.Array, moments: jax.Array, scales: jax.Array) -> jax.Array:
    """The mean over inputs x of ``|weight x - other x|²``, other being rounded with its columns scaled."""
    groups = (weight * scales).reshape(len(weight), -1, grid.size(weight.shape[1]))
    difference = grid.rounded(groups).reshape(weight.shape) / scales - weight
    return jnp.vdot(difference @ moments, difference)


def fold_norm(stored: np.ndarray, scales: np.ndarray, *, plus_one: bool) -> tuple[np.ndarray, np.ndarray]:
    """A norm's weight divided by ``scales``, in its own type, and the f32 scales that it then really has.

    Rounding the weight to its type changes the scales a little; the consumer's columns take these.
    """
    plain = stored.astype(np.float32) + plus_one
    divided = (plain / scales - plus_one).astype(stored.dtype)
    found = divided.astype(np.float32) + plus_one
    sound = (found != 0) & np.isfinite(found)
    divided = np.where(sound, divided, stored)
    return divided, np.where(sound, plain / np.where(sound, found, 1), 1.0).astype(np.float32)


def round_with_clipping(weight: np.ndarray, moments: np.ndarray, grid: IntegerGrid) -> Rounded:
    """f32 ``[out, in]`` to the nearest codes of ranges that are narrowed, group by group, where that errs less."""
    size = grid.size(weight.shape[1])
    places = np.arange(weight.shape[1] // size)
    blocks = moments.reshape(len(places), size, len(places), size)[places, :, places]
    return grid.nearest(weight, _best_shrinks(grid, jnp.asarray(weight), jnp.asarray(blocks)))


@partial(jax.jit, static_argnums=0)
def _best_shrinks(grid: IntegerGrid, weight: jax.Array, blocks: jax.Array) -> jax.Array:
    """``weight [out, in]`` and each group's moments ``[groups, n, n]`` → ``[out, groups]``."""
    groups = weight.reshape(len(weight), len(blocks), -1)

    def error(shrink: jax.Array) -> jax.Array:
        difference = grid.rounded(groups, shrink) - groups
        return jnp.sum(jnp.einsum("ogn,gnm->ogm", difference, blocks) * difference, axis=-1)

    shrinks = jnp.asarray(_SHRINKS, jnp.float32)
    return shrinks[jnp.argmin(jax.lax.map(error, shrinks), axis=0)]
