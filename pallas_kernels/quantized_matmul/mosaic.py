"""Products of few tokens with packed weights, for Hopper GPUs, in Pallas Mosaic GPU.

Such a product is bound by reading the weights, so they are read packed, once, and become bfloat16 (or float16) in
registers only. wgmma computes 64 rows at a time; few tokens would leave most of them empty, so the sides are swapped:
rows of the weight are wgmma's rows and come from registers, the tokens are its columns and come from shared memory.

A thread block (one warpgroup) has some rows of the weight, one tile of tokens, and a range of the inner axis. Tiles of
that range come by TMA, several on their way at once. Within a group of the quantisation, integers less the zero point
are multiplied as they are, which is exact; the group's sum is scaled in float32 when it is added to the total. Ranges
of the inner axis give float32 partial sums, which XLA adds up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import interpret_option
from .config import WARPGROUP_ROWS, MosaicTuningConfig

MAX_CHUNK = 128
"""Columns that are widened at once: 32 registers a thread."""


def quantized_matmul_mosaic(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    bits: int,
    out_dtype: jax.typing.DTypeLike,
    tuning: MosaicTuningConfig,
    interpret: Any = None,
) -> jax.Array:
    """Arguments as in ``quantized_matmul``, within what ``check_mosaic_sizes`` accepts; ``[T, out]`` in ``out_dtype``.

    ``interpret``: None on a GPU, ``dispatch.gpu_interpreter()`` on a CPU.
    """
    num_tokens, in_size = x.shape
    out_size, num_groups = scale.shape
    padded = -(-num_tokens // tuning.tile_tokens) * tuning.tile_tokens
    shape = _Shape(bits, in_size // num_groups, in_size, x.dtype, tuning)
    kernel = plgpu.kernel(
        partial(_kernel, shape=shape),
        out_type=jax.ShapeDtypeStruct((tuning.num_splits, out_size, padded), jnp.float32),
        # The last axis runs fastest: the token tiles of the same weights run together and find them in the cache.
        grid=(tuning.num_splits, out_size // tuning.tile_out, padded // tuning.tile_tokens),
        grid_names=("split", "rows", "tokens"),
        num_threads=tuning.warpgroups,
        thread_name="warpgroup",
        scratch_types=shape.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"quantized_matmul_w{bits}a16",
        **interpret_option(interpret),
    )
    # The same bytes by another name: XLA copies nothing.
    codes = lax.bitcast_convert_type(packed, shape.code_dtype).reshape(out_size, in_size)
    partials = kernel(jnp.pad(x, ((0, padded - num_tokens), (0, 0))), codes, scale, *(() if zero is None else (zero,)))
    return partials.sum(axis=0).T[:num_tokens].astype(out_dtype)


@dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised on."""

    bits: int
    group_size: int
    in_size: int
    dtype: Any
    tuning: MosaicTuningConfig

    @property
    def code_dtype(self) -> Any:
        return jnp.dtype(jnp.int4 if self.bits == 4 else jnp.int8)

    @property
    def chunk(self) -> int:
        """Columns of a tile that are multiplied at once: of one group, and as many as leave registers for the rest."""
        return min(self.group_size, self.tuning.tile_in, MAX_CHUNK)

    @property
    def tile_groups(self) -> int:
        """Groups that a tile touches."""
        return max(1, self.tuning.tile_in // self.group_size)

    @property
    def register_layout(self) -> Any:
        """Of integers in registers: 32 bits of a row's neighbours in each thread, which the conversion to what wgmma
        takes exchanges between threads while they are still narrow."""
        return plgpu.Layout.WGMMA_UPCAST_4X if self.bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        tuning = self.tuning
        stages, tile_out, tile_in, tile_tokens = tuning.stages, tuning.tile_out, tuning.tile_in, tuning.tile_tokens
        # One swizzle for both operands of a product.
        columns = min(64, self.chunk)
        wide = (tuning.warpgroups, WARPGROUP_ROWS, self.chunk)
        return {
            "x_s": _tiled((stages, tile_tokens, tile_in), self.dtype, columns),
            # The sums are stored when all weights have been used: they take their place.
            "w_and_out_s": plgpu.RefUnion(
                _tiled((stages, tile_out, tile_in), self.code_dtype, tile_in),
                plgpu.SMEM((tuning.warpgroups, WARPGROUP_ROWS, tile_tokens), jnp.float32),
            ),
            "wide_s": _tiled(wide, self.dtype, columns) if tuning.stage_a_in_smem else None,
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "used": plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=stages),
            "finished": plgpu.Barrier(num_arrivals=tuning.warpgroups),
        }


def _tiled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Tiles of 8 rows; a row's bytes in a tile are the swizzle: 32, 64 or 128."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    swizzle = plgpu.SwizzleTransform(columns * bits // 8)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))


def _kernel(x_g: Any, w_g: Any, scale_g: Any, *more_g: Any, shape: _Shape, **scratch: Any) -> None:
    *zero_g, out_g = more_g
    x_s, arrived, used = (scratch[name] for name in ("x_s", "arrived", "used"))
    w_s, out_s = scratch["w_and_out_s"]
    tuning = shape.tuning
    tile_in, stages = tuning.tile_in, tuning.stages
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    first_row = lax.axis_index("rows") * tuning.tile_out
    my_rows = pl.ds(first_row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
    tokens = pl.ds(lax.axis_index("tokens") * tuning.tile_tokens, tuning.tile_tokens)
    num_tiles = shape.in_size // tile_in
    first, end = (lax.div((split + i) * num_tiles, jnp.int32(tuning.num_splits)) for i in (0, 1))

    def slot_of(tile: jax.Array) -> jax.Array:
        return lax.rem(tile - first, jnp.int32(stages))

    def fetch(tile: jax.Array) -> None:
        """A tile of weights and one of tokens."""
        slot, columns = slot_of(tile), pl.ds(tile * tile_in, tile_in)
        plgpu.copy_gmem_to_smem(w_g.at[pl.ds(first_row, tuning.tile_out), columns], w_s.at[slot], arrived.at[slot])
        plgpu.copy_gmem_to_smem(x_g.at[tokens, columns], x_s.at[slot], arrived.at[slot])

    def refill(used_tile: jax.Array) -> None:
        plgpu.barrier_wait(used.at[slot_of(used_tile)])
        fetch(used_tile + stages)

    def group_vectors(tile: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        """Scales, and zero points if there are any, of the warpgroup's rows for each group of a tile."""
        group = lax.div(tile * tile_in, jnp.int32(shape.group_size))
        return tuple(
            tuple(_per_row(vectors.at[my_rows, group + i]) for vectors in (scale_g, *zero_g))
            for i in range(shape.tile_groups)
        )

    for i in range(stages):
        pl.when((warpgroup == 0) & (first + i < end))(partial(fetch, first + i))

    def turn(tile: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        total, vectors = carry
        slot = slot_of(tile)
        # Asked for a turn ahead: they come straight from memory, which takes as long as a good part of a turn.
        next_vectors = group_vectors(jnp.minimum(tile + 1, end - 1))
        plgpu.barrier_wait(arrived.at[slot])
        my_part = w_s.at[slot, pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
        codes = plgpu.layout_cast(plgpu.layout_cast(my_part[...], shape.register_layout), plgpu.Layout.WGMMA)
        # The stage of the turn before: all warpgroups are about to be done with it, if they are not yet.
        is_refilled = (warpgroup == 0) & (tile > first) & (tile - 1 + stages < end)
        pl.when(is_refilled)(partial(refill, tile - 1))
        for start in range(0, tile_in, shape.chunk):
            scale, *zero = vectors[start // shape.group_size]
            weights = _widened(codes[:, start : start + shape.chunk], zero, shape)
            weights = _staged(weights, scratch["wide_s"], warpgroup)
            product = _product(weights, x_s.at[slot, :, pl.ds(start, shape.chunk)].T)
            total = total + product * _over_columns(scale.astype(jnp.float32), product.shape)
        plgpu.barrier_arrive(used.at[slot])
        return total, next_vectors

    start = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, tuning.tile_tokens), jnp.float32), plgpu.Layout.WGMMA)
    total, _ = lax.fori_loop(first, end, turn, (start, group_vectors(first)))
    plgpu.barrier_arrive(scratch["finished"])
    plgpu.barrier_wait(scratch["finished"])
    out_s[warpgroup] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[warpgroup], out_g.at[split, my_rows, tokens])
    plgpu.wait_smem_to_gmem(0)
    if tuning.stage_a_in_smem:
        # Nobody needs these stages again; but the interpreter of JAX 0.11 insists that a warpgroup that waits on a
        # barrier at all sees its last phase.
        for i in range(stages):
            pl.when((warpgroup == 0) & (first + i < end))(partial(plgpu.barrier_wait, used.at[i]))


def _per_row(vector: Any) -> jax.Array:
    """One number for each row, in the threads that hold the row; 2 bytes a thread, which Mosaic does not take for
    optimised."""
    options: dict[str, Any] = {"layout": plgpu.Layout.WGMMA.reduce(1), "optimized": False}
    return plgpu.load(vector, **options)


def _over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _widened(codes: jax.Array, zero: Sequence[jax.Array], shape: _Shape) -> jax.Array:
    """Codes less the zero points of their rows: exact."""
    if shape.bits == 4 and shape.dtype == jnp.float16:
        # There is a short way to bfloat16 alone, and from there one that takes two at once.
        codes = codes.astype(jnp.bfloat16).astype(jnp.float32)
    wide = codes.astype(shape.dtype)
    return wide - _over_columns(zero[0].astype(shape.dtype), wide.shape) if zero else wide


def _staged(weights: jax.Array, wide_s: Any | None, warpgroup: jax.Array) -> Any:
    """Through shared memory where asked for: the interpreter has no wgmma with an operand in registers."""
    if wide_s is None:
        return weights
    wide_s[warpgroup] = weights
    plgpu.commit_smem()
    return wide_s.at[warpgroup]


def _product(a: Any, b: Any) -> jax.Array:
    """a ``[rows, C]`` times b ``[C, tokens]``, in float32."""

    def body(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
