"""Products with weights of 4 and 8 bits by the kernel that reads them packed, on one device or cut over several."""

import logging
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...pallas_kernels.quantized_matmul import mosaic_obstacle, quantized_matmul
from ..quantization.weights import IntWeight
from ..sharding import TP_AXIS, Placement

logger = logging.getLogger(__name__)


def kernel_serves(weight: IntWeight, dtype: jnp.dtype, placement: Placement, *, cut_columns: bool) -> bool:
    """Whether x of ``dtype`` is multiplied by the kernel: where attention is a kernel too, if it can serve the share
    of a device. What it cannot serve is named in the log, once."""
    if placement.implementation != "mosaic":
        return False
    obstacle = _obstacle(weight, dtype, placement, cut_columns)
    if obstacle is not None:
        _warn_once(obstacle)
    return obstacle is None


def packed_product(
    x: jax.Array, weight: IntWeight, placement: Placement, *, cut_columns: bool, out_dtype: jnp.dtype
) -> jax.Array:
    """``x [T, in]`` times the weight's transpose → ``[T, out]``, where ``kernel_serves``.

    On several devices each multiplies by its share of the weight: of its columns, ``cut_columns``, and the sums are
    added up; or of its rows.
    """
    groups = weight.scale.shape[1]
    in_size = weight.shape[1] // (placement.num_shards if cut_columns else 1)
    multiply = partial(
        quantized_matmul,
        bits=weight.bits,
        group_size=in_size if groups == 1 else weight.group_size,
        implementation=placement.implementation,
        interpret=placement.interpret,
        out_dtype=out_dtype,
    )
    arrays = (x, weight.packed, weight.scale, weight.zero)
    if placement.num_shards == 1:
        return multiply(*arrays)

    def share(*arrays: Any) -> jax.Array:
        result = multiply(*arrays)
        return jax.lax.psum(result, TP_AXIS) if cut_columns else result

    by_row, by_column = P(TP_AXIS), P(None, TP_AXIS)
    if cut_columns:
        by_group = P() if groups == 1 else by_column
        specs, out_spec = (by_column, by_column, by_group, by_group), P()
    else:
        specs, out_spec = (P(), by_row, by_row, by_row), by_column
    # XLA cannot see through the kernel that the shares are independent, and would gather the whole weight.
    sharded = jax.shard_map(share, mesh=placement.mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
    return sharded(*arrays)


def _obstacle(weight: IntWeight, dtype: jnp.dtype, placement: Placement, cut_columns: bool) -> str | None:
    if weight.minimum is not None:
        return "weights with a minimum for each group (Q4_1)"
    (out_size, in_size), num_shards = weight.shape, placement.num_shards
    group_size = weight.group_size
    if cut_columns:
        in_size //= num_shards
        if weight.scale.shape[1] == 1:
            group_size = in_size
        elif in_size % group_size:
            return f"groups of {group_size} columns that straddle devices"
    else:
        out_size //= num_shards
    return mosaic_obstacle(out_size, in_size, group_size, dtype.name)


@cache
def _warn_once(obstacle: str) -> None:
    logger.warning("quantised weights are widened at every step, which is slow on a GPU: %s", obstacle)
