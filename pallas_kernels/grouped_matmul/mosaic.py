"""The grouped product for Hopper GPUs, in Pallas Mosaic GPU.

A thread block has a run of rows of one group and a tile of that group's weight's rows. Tiles of x and of the weight
come by TMA along the inner axis, several on their way at once, and wgmma adds up in registers. A run begins at its
group's first row wherever that is, so rows need no padding to tiles; of the result only the run's own rows are
written, in pieces of a power of two, since a TMA's size is fixed when the kernel is compiled.

A gated product has half a tile of gate's rows and half a tile of up's in each stage; what comes of both lies side by
side in a thread's registers, and only silu(gate) * up is written.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import interpret_option
from .items import GroupItems
from .tiles import TILE_IN, WARPGROUP_ROWS, MosaicTiles


def grouped_matmul_mosaic(
    x: jax.Array, weight: jax.Array, items: GroupItems, tiles: MosaicTiles, gated: bool, interpret: Any = None
) -> jax.Array:
    """Arguments as in ``grouped_matmul``, within what ``tiles_obstacle`` accepts."""
    num_rows, out_size = x.shape[0], weight.shape[1]
    shape = _Shape(tiles, x.shape[1] // TILE_IN, out_size, gated, interpret is not None)
    kernel = plgpu.kernel(
        partial(_kernel, shape=shape),
        out_type=jax.ShapeDtypeStruct((num_rows, out_size // (2 if gated else 1)), x.dtype),
        # The last axis runs fastest: the tiles of one run find its rows in the cache, and the next run of the same
        # group the weights.
        grid=(items.group.shape[0], out_size // tiles.tile_out),
        grid_names=("item", "columns"),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types=_scratch(shape, x.dtype),
        # The other semantics finds no layout for the store of the result.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        kernel_name="grouped_matmul_gated" if gated else "grouped_matmul",
        **interpret_option(interpret),
    )
    # The last run's tile reaches past the last row, where a TMA reads zeros; the interpreter would complain.
    padded = x if interpret is None else jnp.pad(x, ((0, tiles.rows), (0, 0)))
    result: jax.Array = kernel(padded, weight, *items)
    return result


@dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised on."""

    tiles: MosaicTiles
    num_tiles: int
    """Of the inner axis."""
    out_size: int
    """Rows of a weight."""
    gated: bool
    is_interpreted: bool

    @property
    def out_columns(self) -> int:
        """Of the result, for each thread block: half of its tile's rows if those are gate's and up's."""
        return self.tiles.tile_out // (2 if self.gated else 1)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Of a tile of the weight: where each lies in it, and how far from the result's column in the weight."""
        return ((0, 0), (self.out_columns, self.out_size // 2)) if self.gated else ((0, 0),)


def _scratch(shape: _Shape, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers."""
    tiles = shape.tiles

    def tiled(*rows: int) -> Any:
        transforms = (plgpu.TilingTransform((8, TILE_IN)), plgpu.SwizzleTransform(TILE_IN * jnp.dtype(dtype).itemsize))
        return plgpu.SMEM((tiles.stages, *rows, TILE_IN), dtype, transforms=transforms)

    return {
        "x_s": tiled(tiles.warpgroups, WARPGROUP_ROWS),
        # The result is stored when all weights have been used: it takes their place.
        "w_and_out_s": plgpu.RefUnion(
            tiled(tiles.tile_out), plgpu.SMEM((tiles.warpgroups, WARPGROUP_ROWS, shape.out_columns), dtype)
        ),
        "arrived": plgpu.Barrier(num_arrivals=len(shape.parts) + tiles.warpgroups, num_barriers=tiles.stages),
        "used": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
        "finished": plgpu.Barrier(num_arrivals=tiles.warpgroups),
    }


def _kernel(
    x_g: Any,
    w_g: Any,
    group_g: Any,
    first_g: Any,
    count_g: Any,
    out_g: Any,
    *,
    shape: _Shape,
    **scratch: Any,
) -> None:
    item = lax.axis_index("item")
    count = count_g[item]

    @pl.when(count > 0)
    def _() -> None:
        rows = (first_g[item], count)
        _run(x_g, w_g.at[group_g[item]], out_g, rows, shape=shape, **scratch)
        if shape.is_interpreted:
            # Nobody needs these stages again; but the interpreter of JAX 0.11 insists that a warpgroup that waits on a
            # barrier at all sees its last phase.
            stages, num_tiles = shape.tiles.stages, shape.num_tiles
            for tile in range(max(0, num_tiles - stages), num_tiles - 1):
                used = scratch["used"].at[tile % stages]
                pl.when(lax.axis_index("warpgroup") == 0)(partial(plgpu.barrier_wait, used))


def _run(
    x_g: Any,
    w_g: Any,
    out_g: Any,
    rows: tuple[jax.Array, jax.Array],
    *,
    shape: _Shape,
    **scratch: Any,
) -> None:
    """One run of rows: the first, and how many."""
    tiles, num_tiles = shape.tiles, shape.num_tiles
    first_row, count = rows
    x_s, arrived, used, finished = (scratch[name] for name in ("x_s", "arrived", "used", "finished"))
    w_s, out_s = scratch["w_and_out_s"]
    stages, warpgroup = tiles.stages, lax.axis_index("warpgroup")
    first_column, size = lax.axis_index("columns") * shape.out_columns, shape.out_columns

    def fetch(tile: jax.Array) -> None:
        slot, inner = lax.rem(tile, jnp.int32(stages)), pl.ds(tile * TILE_IN, TILE_IN)
        for part in range(tiles.warpgroups):
            rows = pl.ds(first_row + part * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.copy_gmem_to_smem(x_g.at[rows, inner], x_s.at[slot, part], arrived.at[slot])
        for place, distance in shape.parts:
            part_rows = pl.ds(first_column + distance, size)
            plgpu.copy_gmem_to_smem(w_g.at[part_rows, inner], w_s.at[slot, pl.ds(place, size)], arrived.at[slot])

    def refill(tile: jax.Array) -> None:
        """The stage of a tile that this warpgroup has used, when all have."""
        plgpu.barrier_wait(used.at[lax.rem(tile, jnp.int32(stages))])
        fetch(tile + stages)

    for i in range(min(stages, num_tiles)):
        pl.when(warpgroup == 0)(partial(fetch, jnp.int32(i)))

    def product(accumulator: Any) -> jax.Array:
        @pl.loop(0, num_tiles)
        def _(tile: jax.Array) -> None:
            slot = lax.rem(tile, jnp.int32(stages))
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.wgmma(accumulator, x_s.at[slot, warpgroup], w_s.at[slot].T)
            # The product before is done when only this one is under way.
            plgpu.wgmma_wait(1)

            @pl.when(tile > 0)
            def _() -> None:
                plgpu.barrier_arrive(used.at[lax.rem(tile - 1, jnp.int32(stages))])

            pl.when((warpgroup == 0) & (tile > 0) & (tile - 1 + stages < num_tiles))(lambda: refill(tile - 1))

        return accumulator[...]

    total = pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, tiles.tile_out), jnp.float32))
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
    if shape.gated:
        total = _silu(total[:, :size]) * total[:, size:]
    _store_rows(out_s.at[warpgroup], total.astype(out_s.dtype))
    plgpu.commit_smem()
    mine = jnp.clip(count - warpgroup * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)
    columns, piece = pl.ds(first_column, size), WARPGROUP_ROWS
    while piece:
        offset = mine & ~(2 * piece - 1)
        target = out_g.at[pl.ds(first_row + warpgroup * WARPGROUP_ROWS + offset, piece), columns]
        pl.when(mine & piece != 0)(partial(plgpu.copy_smem_to_gmem, out_s.at[warpgroup, pl.ds(offset, piece)], target))
        piece //= 2
    plgpu.wait_smem_to_gmem(0)


def _silu(x: jax.Array) -> jax.Array:
    """1 / y as the square of 1 / sqrt(y), an instruction: a division takes the registers of a second thread block."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * root * root


def _store_rows(ref: Any, value: jax.Array) -> None:
    """In plain rows, so that any number of them can be copied: there is no store of 2 bytes without bank conflicts
    then. An assignment allows for those before JAX 0.12, where it is all there is, and not from then on."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
