"""Products with weights of 4 or 8 bits that have a scale, and possibly a zero point, for each group of columns."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch import Implementation, check_implementation, load_mosaic
from ..tuning import measured_for, num_multiprocessors, size_class
from .config import BITS, MAX_KERNEL_TOKENS, TOKEN_CLASSES, MosaicTuningConfig, check_mosaic_sizes, mosaic_tuning
from .float8 import float8_matmul
from .xla import WORD_BITS, quantized_matmul_xla

__all__ = ["float8_matmul", "mosaic_obstacle", "quantized_matmul", "tuning_facts"]


def quantized_matmul(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    bits: int,
    group_size: int,
    implementation: Implementation = "xla",
    interpret: Any = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """``x`` times the transpose of ``w[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]``.

    Args:
      x: ``[T, in]``, bfloat16, float16 or, for "xla", float32.
      packed: i32 ``[out, in * bits / 32]``: signed codes in two's complement, code i of a row in word
        ``i * bits // 32``, the first of a word in its lowest bits.
      scale: ``[out, in / group_size]``, in a floating type.
      zero: i8 ``[out, in / group_size]``; None: 0.
      bits: 4 or 8.
      group_size: columns that share a scale; ``in`` for a whole row's.
      implementation: "xla" widens the weight as a whole, then multiplies. "mosaic" reads it packed, for up to
        ``MAX_KERNEL_TOKENS`` tokens; more are multiplied as by "xla", which is cheaper then.
      interpret: for "mosaic" on a CPU, ``dispatch.gpu_interpreter()``.
      out_dtype: of the result; None: x's type.

    Returns:
      ``[T, out]``; sums are float32. "mosaic" multiplies with the codes less their zero point, which are
      exact, and scales float32 sums; "xla" rounds the widened weight to x's type.

    Raises:
      ValueError: shapes, types or options that do not fit, or that "mosaic" cannot serve. NotImplementedError:
      "mosaic" with a JAX that is too old for it.
    """
    check_implementation(implementation)
    _check_inputs(x, packed, scale, zero, bits, group_size)
    tuning = None
    if implementation == "mosaic":
        shape = (packed.shape[0], x.shape[1])
        check_mosaic_sizes(*shape, group_size, str(x.dtype))
        load_mosaic("quantized_matmul")
        if 0 < x.shape[0] <= MAX_KERNEL_TOKENS:
            tuning = _tuning(x.shape[0], shape, bits, group_size, interpret)
    static = _Static(bits, jnp.dtype(x.dtype if out_dtype is None else out_dtype), tuning, interpret)
    return _multiply(x, packed, scale, zero, static)


def mosaic_obstacle(out_size: int, in_size: int, group_size: int, dtype: str) -> str | None:
    """Why the Mosaic kernel cannot multiply x of ``dtype`` by such a weight; None if it can."""
    try:
        check_mosaic_sizes(out_size, in_size, group_size, dtype)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Static:
    """What a call is specialised on, besides its shapes."""

    bits: int
    out_dtype: Any
    tuning: MosaicTuningConfig | None
    """None for "xla"."""
    interpret: Any


@partial(jax.jit, static_argnames="static")
def _multiply(x: jax.Array, packed: jax.Array, scale: jax.Array, zero: jax.Array | None, static: _Static) -> jax.Array:
    """An inner jit: the layers of a model with equal shapes and options share one trace."""
    common = {"bits": static.bits, "out_dtype": static.out_dtype}
    if static.tuning is None:
        return quantized_matmul_xla(x, packed, scale, zero, **common)
    kernel = load_mosaic("quantized_matmul").quantized_matmul_mosaic
    return kernel(x, packed, scale, zero, **common, tuning=static.tuning, interpret=static.interpret)


def tuning_facts(num_tokens: int, shape: tuple[int, int], bits: int, group_size: int) -> dict[str, Any]:
    """What measured sizes are chosen by. ``shape``: (out, in)."""
    facts = {"out_size": shape[0], "in_size": shape[1], "bits": bits, "group_size": group_size}
    return {**facts, "tokens_up_to": size_class(num_tokens, TOKEN_CLASSES)}


def _tuning(num_tokens: int, shape: tuple[int, int], bits: int, group_size: int, interpret: Any) -> MosaicTuningConfig:
    """What was measured on this GPU, or else what ``mosaic_tuning`` reasons. ``shape``: (out, in)."""
    measured = measured_for("quantized_matmul", tuning_facts(num_tokens, shape, bits, group_size), interpret) or {}
    reasoned = mosaic_tuning(
        num_tokens,
        *shape,
        bits=bits,
        group_size=group_size,
        num_multiprocessors=num_multiprocessors(),
        interpreted=interpret is not None,
    )
    return replace(reasoned, **measured)


def _check_inputs(
    x: jax.Array, packed: jax.Array, scale: jax.Array, zero: jax.Array | None, bits: int, group_size: int
) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}; got {bits}")
    if packed.ndim != 2 or packed.dtype != jnp.int32:
        raise ValueError(f"packed must be int32 [out, words]; got {packed.dtype} {list(packed.shape)}")
    in_size = packed.shape[1] * WORD_BITS // bits
    if x.ndim != 2 or x.shape[1] != in_size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be [T, {in_size}] in a floating type; got {x.dtype} {list(x.shape)}")
    if group_size < 1 or in_size % group_size:
        raise ValueError(f"group_size {group_size} does not divide the {in_size} columns of the weight")
    groups = (packed.shape[0], in_size // group_size)
    if scale.shape != groups or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale must be {list(groups)} in a floating type; got {scale.dtype} {list(scale.shape)}")
    if zero is not None and (zero.shape != groups or zero.dtype != jnp.int8):
        raise ValueError(f"zero must be int8 {list(groups)}; got {zero.dtype} {list(zero.shape)}")
