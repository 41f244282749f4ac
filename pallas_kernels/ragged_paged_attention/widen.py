"""Fetching tiles of a float8 pool for the Mosaic kernel of mixed attention.

wgmma takes no float8 beside float16. So the fetching warpgroup, which would only wait otherwise, converts each tile
from where its TMA put it to where the computing warpgroups expect it. Keys and values of a tile take turns in one ring
of raw tiles, a few of which are on their way while one is converted.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .items import Item, KernelShape, Ref, Refs

ROWS = 64
"""Keys converted at a time, all that the fetching warpgroup's registers hold."""


def fetch_widened(
    refs: Refs,
    shape: KernelShape,
    item: Item,
    turns: jax.Array,
    clear_unwritten: Callable[[Refs, KernelShape, Item, jax.Array, jax.Array], None],
) -> None:
    """All keys and values of an item, as what is multiplied. ``turns``: of the items before this one."""
    raw_stages, tile_kv = shape.tuning.raw_stages, shape.tuning.tile_kv
    num_raw = 2 * item.num_turns

    def fetch(step: jax.Array) -> None:
        """Keys (even steps) or values (odd ones) of turn ``step // 2``, on their way."""
        slot = lax.rem(step, jnp.int32(raw_stages))
        tile = item.last_tile - lax.div(step, jnp.int32(2))
        for b in range(shape.tile_blocks):
            place = jnp.clip(tile * shape.tile_blocks + b, item.first_block, item.last_block)
            block = refs.kv.at[refs.tables[item.row, place], lax.rem(step, jnp.int32(2)), item.head // shape.group]
            target = refs.raw_smem.at[slot, pl.ds(b * shape.block_size, shape.block_size)]
            plgpu.copy_gmem_to_smem(block, target, refs.raw_full.at[slot])

    def widen(step: jax.Array, wide_smem: Ref, slot: jax.Array) -> None:
        raw_slot = lax.rem(step, jnp.int32(raw_stages))
        plgpu.barrier_wait(refs.raw_full.at[raw_slot])
        _widen_tile(refs.raw_smem.at[raw_slot], wide_smem.at[slot], shape)
        # All have read the raw tile by now, so the next one may take its place.
        pl.when(step + raw_stages < num_raw)(partial(fetch, step + raw_stages))

    def turn(index: jax.Array, _: None) -> None:
        slot = lax.rem(turns + index, jnp.int32(shape.tuning.stages))
        is_reused = turns + index >= shape.tuning.stages
        first_key = (item.last_tile - index) * tile_kv
        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.k_empty.at[slot]))
        widen(2 * index, refs.k_smem, slot)
        plgpu.barrier_arrive(refs.k_full.at[slot])
        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.v_empty.at[slot]))
        widen(2 * index + 1, refs.v_smem, slot)
        is_partial = (index == 0) & (first_key + tile_kv > item.seq_len)
        pl.when(is_partial)(lambda: clear_unwritten(refs, shape, item, slot, first_key))
        plgpu.barrier_arrive(refs.v_full.at[slot])

    for step in range(raw_stages):
        pl.when(step < num_raw)(partial(fetch, jnp.int32(step)))
    lax.fori_loop(0, item.num_turns, turn, None)


def _widen_tile(raw: Ref, wide: Ref, shape: KernelShape) -> None:
    """Both ``[tile_kv, H]``. Ends with all threads done, and the result visible to wgmma."""
    width = shape.slice_columns

    @pl.loop(0, shape.head_dim // width)
    def _(index: jax.Array) -> None:
        columns = pl.ds(pl.multiple_of(index * width, width), width)
        for first in range(0, shape.tuning.tile_kv, ROWS):
            rows = pl.ds(first, ROWS)
            wide[rows, columns] = raw[rows, columns].astype(wide.dtype)

    plgpu.commit_smem()
