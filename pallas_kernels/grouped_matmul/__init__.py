"""Products of rows with one of several weights, rows of the same weight side by side: the experts of a mixture."""

from functools import partial
from typing import Any

import jax

from ..dispatch import load_mosaic
from .items import GroupItems, plan_items
from .tiles import MosaicTiles, mosaic_tiles, tiles_obstacle

__all__ = [
    "GroupItems",
    "MosaicTiles",
    "grouped_matmul",
    "mosaic_tiles",
    "plan_items",
    "tiles_obstacle",
]


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array,
    items: GroupItems,
    *,
    tiles: MosaicTiles,
    gated: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Each group of rows times its own weight, for Hopper GPUs.

    Args:
      x: ``[A, in]``, rows of group 0 first, then those of group 1, …; bfloat16 or float16.
      weight: ``[E, out, in]``, in x's type.
      items: ``plan_items`` of the groups' ends, for these tiles. One plan serves all products of a layer.
      tiles: ``mosaic_tiles``.
      gated: a weight is gate's rows, then up's, and the result silu(gate) * up, half as wide.
      interpret: on a CPU, ``dispatch.gpu_interpreter()``.

    Returns:
      ``[A, out]`` in x's type, ``[A, out / 2]`` if gated; all is float32 before. Rows past the last group hold
      anything, NaN too.

    Raises:
      ValueError: shapes or types that do not fit, or that the kernel cannot serve. NotImplementedError: a JAX that is
      too old for it.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(f"cannot multiply x {x.shape} {x.dtype} by weights {weight.shape} {weight.dtype} in groups")
    if obstacle := tiles_obstacle(x.shape[1], weight.shape[1], x.dtype.name, tiles):
        raise ValueError(obstacle)
    return _grouped_matmul(x, weight, items, tiles=tiles, gated=gated, interpret=interpret)


@partial(jax.jit, static_argnames=("tiles", "gated", "interpret"))
def _grouped_matmul(
    x: jax.Array, weight: jax.Array, items: GroupItems, *, tiles: MosaicTiles, gated: bool, interpret: Any
) -> jax.Array:
    result: jax.Array = load_mosaic("grouped_matmul").grouped_matmul_mosaic(x, weight, items, tiles, gated, interpret)
    return result
