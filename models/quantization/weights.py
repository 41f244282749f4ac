"""How quantised weights lie on the device, whatever the checkpoint's own layout was: pytrees that stand where a plain
``weight [out, in]`` would. Only ``layers/linear.py`` asks which of them a weight is.

Every array of a weight has the output rows as axis 0, so that weights of several layers fuse, and are shared among
devices, by rows. Along axis 1 lie the input columns, or words or groups of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..errors import ModelConfigError
from .spec import WeightSpec, WeightSpecs, can_fuse

WORD_BITS = 32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("packed", "scale", "zero", "minimum", "permutation"),
    meta_fields=("bits",),
)
@dataclass(frozen=True)
class IntWeight:
    """Signed codes of 4 or 8 bits with a scale for each group of input columns (2 and 3 bits are kept in 4).

    ``w[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]``; an absent zero is 0. Formats that count
    codes and zero points from 0 have ``2 ** (bits - 1)`` taken off both. With a ``minimum`` there is no zero, and
    ``w = (code + 2 ** (bits - 1)) * scale + minimum``. Column i is multiplied by ``x[permutation[i]]`` where there is
    a permutation.
    """

    packed: jax.Array
    """i32 ``[out, in * bits / 32]``, codes in two's complement, the first of a word in its lowest bits: the bytes of
    ``int4`` or ``int8 [out, in]``."""
    scale: jax.Array
    """``[out, in / group]``, in the type the model runs in; group = in where one scale serves a whole row."""
    zero: jax.Array | None = None
    """i8 ``[out, in / group]``."""
    minimum: jax.Array | None = None
    """Like ``scale``. Only GGUF's Q4_1 has it."""
    permutation: jax.Array | None = None
    """i32 ``[in]``: the columns are in order of group (GPTQ's desc_act)."""
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), as a plain weight's."""
        return int(self.packed.shape[0]), int(self.packed.shape[1]) * WORD_BITS // self.bits

    @property
    def group_size(self) -> int:
        return self.shape[1] // int(self.scale.shape[1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "scale", "input_scale"),
    meta_fields=("activations",),
)
@dataclass(frozen=True)
class Float8Weight:
    """``w[o, i] = weight[o, i] * scale[o, i // group]``. ``activations`` says what x is rounded to where the device
    multiplies float8 by float8: "none" (x as it is), "token" (a scale for each row of x), "static" (``input_scale``).
    """

    weight: jax.Array
    """float8_e4m3fn ``[out, in]``."""
    scale: jax.Array
    """f32 ``[out, in / group]``; group = in for scales per tensor and per channel."""
    input_scale: jax.Array | None = None
    """f32 ``[parts]``, with "static" only: of each fused part; the largest serves all."""
    activations: str = "none"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.weight.shape[0]), int(self.weight.shape[1])

    @property
    def group_size(self) -> int:
        return self.shape[1] // int(self.scale.shape[1])


@partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=())
@dataclass(frozen=True)
class PartedWeight:
    """The parts of a fused weight (q, k, v; gate, up) side by side, where they cannot lie in one array."""

    parts: tuple[Any, ...]
    """Each a plain array ``[out, in]``, an ``IntWeight`` or a ``Float8Weight``."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(int(part.shape[0]) for part in self.parts), int(self.parts[0].shape[1])


QuantizedWeight: TypeAlias = IntWeight | Float8Weight | PartedWeight
Weight: TypeAlias = jax.Array | QuantizedWeight
QUANTIZED_TYPES = (IntWeight, Float8Weight, PartedWeight)


_WITHOUT_ROWS = ("permutation", "input_scale")


def is_split(field: str, array: Any, *, by_rows: bool) -> bool:
    """Whether devices share a field of a weight, whose rows or columns they share. One scale for all columns is had by
    each, and so is what has no rows."""
    return field not in _WITHOUT_ROWS and (by_rows or array.shape[1] > 1)


def rows_of(weight: Any, take: Callable[[jax.Array], jax.Array]) -> Any:
    """An ``IntWeight`` or ``Float8Weight`` with ``take`` applied to every array that has output rows."""
    fields = {
        name: value if name in _WITHOUT_ROWS or value is None or isinstance(value, str | int) else take(value)
        for name, value in vars(weight).items()
    }
    return type(weight)(**fields)


def unpack_codes(packed: jax.Array, bits: int) -> jax.Array:
    """i32 words ``[out, words]`` → signed i32 codes ``[out, words * 32 / bits]``."""
    lower = jnp.arange(WORD_BITS - bits, -1, -bits, dtype=jnp.int32)
    return ((packed[..., None] << lower) >> (WORD_BITS - bits)).reshape(packed.shape[0], -1)


def dequantize(weight: IntWeight | Float8Weight, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The plain ``[out, in]`` in ``dtype``, rounded once from float32; columns in the order they are kept in."""
    out_size, in_size = weight.shape
    groups = (out_size, weight.scale.shape[1], weight.group_size)
    scale = weight.scale.astype(jnp.float32)[..., None]
    if isinstance(weight, Float8Weight):
        values = weight.weight.astype(jnp.float32).reshape(groups) * scale
        return values.reshape(out_size, in_size).astype(dtype)
    codes = unpack_codes(weight.packed, weight.bits).reshape(groups)
    if weight.minimum is not None:
        counted = codes + (1 << (weight.bits - 1))
        values = counted.astype(jnp.float32) * scale + weight.minimum.astype(jnp.float32)[..., None]
    else:
        if weight.zero is not None:
            codes = codes - weight.zero.astype(jnp.int32)[..., None]
        values = codes.astype(jnp.float32) * scale
    return values.reshape(out_size, in_size).astype(dtype)


def empty_weight(
    specs: WeightSpecs, sizes: Sequence[int], in_size: int, dtype: jax.typing.DTypeLike, input_shards: int = 1
) -> Any:
    """A weight of zeros with ``sizes`` rows per part, as ``specs`` say; a plain array where they say nothing.

    One spec stands for all parts. ``input_shards``: devices over which the columns are cut.
    """
    spec = specs[0] if specs else None
    if not can_fuse(specs or (None,)):
        pairs = zip(specs, sizes, strict=True)
        return PartedWeight(tuple(empty_weight((spec,), (size,), in_size, dtype, input_shards) for spec, size in pairs))
    if spec is None:
        return jnp.zeros((sum(sizes), in_size), dtype)
    return _empty_quantized(spec, sum(sizes), in_size, dtype, (input_shards, len(specs)))


def _empty_quantized(
    spec: WeightSpec, out_size: int, in_size: int, dtype: jax.typing.DTypeLike, shards_and_parts: tuple[int, int]
) -> IntWeight | Float8Weight:
    input_shards, num_parts = shards_and_parts
    if in_size % input_shards or (spec.kind == "int" and in_size // input_shards * spec.device_bits % WORD_BITS):
        raise ModelConfigError(
            f"quantization: {in_size} input columns over {input_shards} devices: each needs a multiple of "
            f"{WORD_BITS // spec.device_bits} columns for weights of {spec.device_bits} bits"
        )
    num_groups = in_size // spec.group_on_device(in_size, input_shards)
    if spec.kind == "float8":
        return Float8Weight(
            weight=jnp.zeros((out_size, in_size), jnp.float8_e4m3fn),
            scale=jnp.zeros((out_size, num_groups), jnp.float32),
            input_scale=jnp.zeros((num_parts,), jnp.float32) if spec.activations == "static" else None,
            activations=spec.activations,
        )
    scale = jnp.zeros((out_size, num_groups), dtype)
    return IntWeight(
        packed=jnp.zeros((out_size, in_size * spec.device_bits // WORD_BITS), jnp.int32),
        scale=scale,
        zero=jnp.zeros(scale.shape, jnp.int8) if spec.has_zero else None,
        minimum=jnp.zeros(scale.shape, dtype) if spec.has_minimum else None,
        permutation=jnp.zeros((in_size,), jnp.int32) if spec.act_order else None,
        bits=spec.device_bits,
    )
