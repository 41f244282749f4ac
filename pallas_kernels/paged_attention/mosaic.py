"""Decode attention for Hopper GPUs, in Pallas Mosaic GPU.

Two kernels. The first has a thread block (one warpgroup) for every work item and KV head: the item's keys come in
tiles, one TMA per KV block through the block table, while the tile before is used; the query heads that share the KV
head fill the top rows of wgmma's 64. It writes a normalised float32 partial result and its logsumexp. The second has
a thread block for every row and query head and merges the row's partials, and the head's sink.

Logits are kept in units of log2, so that exponentials are the hardware's ex2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention_common import LOWEST_MAX, MASK_VALUE, AttentionOptions
from ..compat import interpret_option
from ..packed_array import PackedArray
from .config import MosaicTuningConfig
from .work import ITEM_FIELDS, WorkPlan

ROWS = 64
"""wgmma's M: the query heads of one KV head, padded."""
LANES = 128
"""Threads of a warpgroup; vectors that the combine holds in registers have a multiple of so many elements."""
LOG2_E = math.log2(math.e)
KEYS, VALUES = 0, 1
"""Where they are in a block of the pool."""


def paged_attention_mosaic(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    work: WorkPlan,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tuning: MosaicTuningConfig,
    interpret: Any = None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """Shapes as in ``paged_attention``, within what ``dispatch.check_mosaic_shapes`` accepts.

    ``kv_scales``: f32[2], what the pool's keys and values are to be multiplied by; None: nothing.
    ``interpret``: None on a GPU, ``dispatch.gpu_interpreter()`` on a CPU.
    """
    partials, logsumexps = attend_items(q, kv, block_tables, work, options, tuning, interpret, kv_scales)
    return combine_items(partials, logsumexps, work, sinks, q.shape, q.dtype, interpret)


@dataclass(frozen=True)
class _Shape:
    """What the first kernel is specialised on."""

    group: int
    head_dim: int
    block_size: int
    dtype: Any
    """Of the products' operands."""
    kv_dtype: Any
    """Of the pool; keys and values are widened to ``dtype`` tile by tile."""
    options: AttentionOptions
    tuning: MosaicTuningConfig
    items_start: int
    """Where the work items begin in their vector."""
    in_place: bool
    """Products are added to the accumulator by wgmma itself; the interpreter has no accumulator that begins with a
    value, so there they are added afterwards."""

    @property
    def padded_group(self) -> int:
        """Whole tiles of 8 rows."""
        return -(-self.group // 8) * 8

    @property
    def padded_head_dim(self) -> int:
        return -(-self.head_dim // LANES) * LANES

    @property
    def tile_blocks(self) -> int:
        return self.tuning.tile_kv // self.block_size

    @property
    def widens(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def slice_columns(self) -> int:
        """Columns of a tile in shared memory, and of what is changed in it at once: 128 bytes of operands, the widest
        swizzle, where head_dim is a multiple of that. With 256 columns and widening, 128 bytes would spill registers.
        """
        return math.gcd(self.head_dim, 32 if self.widens and self.head_dim > 128 else 64)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        tile_kv, stages, head_dim = self.tuning.tile_kv, self.tuning.stages, self.head_dim
        tiles = self._tiled((stages, tile_kv, head_dim), self.kv_dtype)
        arrived = plgpu.Barrier(num_arrivals=self.tile_blocks, num_barriers=stages)
        return {
            "q_s": self._tiled((ROWS, head_dim), self.dtype),
            # The result is written when the last keys have been used: it takes their place.
            "k_and_out_s": plgpu.RefUnion(tiles, plgpu.SMEM((ROWS, head_dim), jnp.float32)),
            "v_s": tiles,
            "wide_s": self._tiled((tile_kv, head_dim), self.dtype) if self.widens else None,
            "p_s": self._tiled((ROWS, tile_kv), self.dtype) if self.tuning.stage_a_in_smem else None,
            "lse_s": plgpu.SMEM((ROWS,), jnp.float32),
            "q_bar": plgpu.Barrier(),
            "k_bar": arrived,
            "v_bar": arrived,
        }

    def _tiled(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """wgmma wants tiles of 8 rows, and one swizzle for both operands of a product."""
        swizzle = plgpu.SwizzleTransform(self.slice_columns * jnp.dtype(dtype).itemsize)
        transforms = (plgpu.TilingTransform((8, self.slice_columns)), swizzle)
        return plgpu.SMEM(shape, dtype, transforms=transforms)


def attend_items(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    work: WorkPlan,
    options: AttentionOptions,
    tuning: MosaicTuningConfig,
    interpret: Any = None,
    kv_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each item's result over its own keys, and the logsumexp of its logits in units of log2.

    A float8 pool is widened to float16, which holds all its values and to which the hardware converts at once;
    queries are rounded to float16 then.

    Returns f32 ``[W, K, Gp, Hp]`` (the first G rows and H columns hold something) and f32 ``[W, K, 64]`` (the first G).
    Padding items write nothing.
    """
    items = PackedArray.of(work.items)
    num_items = items.shape[0]
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    shape = _Shape(
        group=q.shape[1] // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=jnp.dtype(jnp.float16) if kv.dtype.itemsize == 1 else q.dtype,
        kv_dtype=kv.dtype,
        options=options,
        tuning=tuning,
        items_start=items.start,
        in_place=interpret is None,
    )
    q = q.reshape(-1, num_kv_heads, shape.group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, shape.padded_group - shape.group), (0, 0))).astype(shape.dtype)
    kernel = plgpu.kernel(
        partial(_attend_kernel, shape=shape),
        out_type=(
            jax.ShapeDtypeStruct((num_items, num_kv_heads, shape.padded_group, shape.padded_head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, ROWS), jnp.float32),
        ),
        # The last axis runs fastest: the heads of an item, neighbours in the pool, are read at about the same time.
        grid=(num_items, num_kv_heads),
        grid_names=("item", "kv_head"),
        scratch_types=shape.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention",
        **interpret_option(interpret),
    )
    return kernel(q, kv, block_tables, items.vector, *(() if kv_scales is None else (kv_scales,)))


def _attend_kernel(
    q_g: Any, kv_g: Any, tables_g: Any, items_g: Any, *more_g: Any, shape: _Shape, **scratch: Any
) -> None:
    *scales_g, partial_g, lse_g = more_g
    k_scale, v_scale = (scales_g[0][0], scales_g[0][1]) if scales_g else (1.0, 1.0)
    q_s, v_s, wide_s, p_s, lse_s = (scratch[name] for name in ("q_s", "v_s", "wide_s", "p_s", "lse_s"))
    k_s, out_s = scratch["k_and_out_s"]
    q_bar, k_bar, v_bar = (scratch[name] for name in ("q_bar", "k_bar", "v_bar"))
    item, head = lax.axis_index("item"), lax.axis_index("kv_head")
    first_field = shape.items_start + item * ITEM_FIELDS
    row, first_key, end, first_seen = (items_g[first_field + i] for i in range(ITEM_FIELDS))
    block_size, tile_kv, stages = shape.block_size, shape.tuning.tile_kv, shape.tuning.stages
    group = pl.ds(0, shape.padded_group)

    def block_ids(tile: jax.Array) -> tuple[jax.Array, ...]:
        """The tile's blocks. Past the end: the item's last block again, which masking makes harmless."""
        start, last = first_key // block_size + tile * shape.tile_blocks, (end - 1) // block_size
        return tuple(tables_g[row, jnp.minimum(start + i, last)] for i in range(shape.tile_blocks))

    def fetch(which: int, ids: tuple[jax.Array, ...], slot: jax.Array) -> None:
        """Keys (0) or values (1) of the blocks, to a stage: one TMA each."""
        tiles, bar = ((k_s, k_bar), (v_s, v_bar))[which]
        for i, block in enumerate(ids):
            target = tiles.at[slot, pl.ds(i * block_size, block_size)]
            plgpu.copy_gmem_to_smem(kv_g.at[block, which, head], target, bar.at[slot])

    @pl.when(end > first_key)
    def _() -> None:
        num_tiles = pl.cdiv(end - first_key, tile_kv)
        # Rows past the group stay as they are: a row of the products depends on its own query only.
        plgpu.copy_gmem_to_smem(q_g.at[row, head], q_s.at[group], q_bar)

        def fetch_both(tile: jax.Array) -> None:
            ids = block_ids(tile)
            fetch(KEYS, ids, tile)
            fetch(VALUES, ids, tile)

        for i in range(stages):
            pl.when(i < num_tiles)(partial(fetch_both, jnp.int32(i)))
        plgpu.barrier_wait(q_bar)

        def operand(tile_s: Any) -> Any:
            return _widen(tile_s, wide_s, shape.slice_columns) if shape.widens else tile_s

        def turn(tile: jax.Array, carry: tuple[_State, tuple[jax.Array, ...]]) -> Any:
            state, next_ids = carry
            slot = lax.rem(tile, jnp.int32(stages))
            refill = pl.when(tile + stages < num_tiles)
            first, last = first_seen - (first_key + tile * tile_kv), end - (first_key + tile * tile_kv)
            plgpu.barrier_wait(k_bar.at[slot])
            logits = _logits(q_s, operand(k_s.at[slot]), shape.options, k_scale)
            refill(lambda: fetch(KEYS, next_ids, slot))
            state, probs = _softmax_step(state, _mask(logits, first, last))
            weights = _staged(probs.astype(shape.dtype), p_s)
            plgpu.barrier_wait(v_bar.at[slot])
            values = operand(v_s.at[slot])
            pl.when((first > 0) | (last < tile_kv))(lambda: _zero_unseen_rows(values, shape.slice_columns, first, last))
            state = state._replace(accumulator=_add_values(state.accumulator, weights, values, shape.in_place))
            refill(lambda: fetch(VALUES, next_ids, slot))
            # Looked up a turn ahead: a load from the table takes as long as a good part of a turn.
            return state, block_ids(tile + stages + 1)

        start = (_empty_state(shape.head_dim), block_ids(jnp.int32(stages)))
        state, _ids = lax.fori_loop(0, num_tiles, turn, start)
        _store(state, v_scale, out_s, lse_s)
        plgpu.commit_smem()
        columns = pl.ds(0, shape.head_dim)
        plgpu.copy_smem_to_gmem(out_s.at[group], partial_g.at[item, head, :, columns])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[item, head])
        plgpu.wait_smem_to_gmem(0)


class _State(NamedTuple):
    """The online softmax in registers, over the padded rows."""

    maximum: jax.Array  # f32[64], units of log2
    denominator: jax.Array  # f32[64]
    accumulator: jax.Array  # f32[64, H]


def _empty_state(head_dim: int) -> _State:
    per_row = plgpu.Layout.WGMMA.reduce(1)
    return _State(
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST_MAX, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
    )


def _over_columns(x: jax.Array, num_columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (ROWS, num_columns), [0])


def _product(a: Any, b: Any) -> jax.Array:
    """a ``[64, C]`` times b ``[C, M]``, in float32."""

    def body(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, b.shape[1]), jnp.float32))


def _logits(q_s: Any, k_s: Any, options: AttentionOptions, k_scale: jax.Array | float) -> jax.Array:
    logits = _product(q_s, k_s.T)
    if options.softcap is None:
        return logits * (k_scale * (options.scale * LOG2_E))
    return jnp.tanh(logits * (k_scale * (options.scale / options.softcap))) * (options.softcap * LOG2_E)


def _mask(logits: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
    """Logits with the keys outside [first, end) of the tile at MASK_VALUE."""
    key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where((key >= first) & (key < end), logits, MASK_VALUE)


def _softmax_step(state: _State, logits: jax.Array) -> tuple[_State, jax.Array]:
    """The state rescaled to the new maximum, with the denominator up to date, and the probabilities."""
    maximum = jnp.maximum(state.maximum, logits.max(axis=1))
    decay = jnp.exp2(state.maximum - maximum)
    probs = jnp.exp2(logits - _over_columns(maximum, logits.shape[1]))
    accumulator = state.accumulator * _over_columns(decay, state.accumulator.shape[1])
    return _State(maximum, state.denominator * decay + probs.sum(axis=1), accumulator), probs


def _zero_unseen_rows(v_s: Any, columns: int, first: jax.Array, end: jax.Array) -> None:
    """Zeros the tile's values outside [first, end): they may be NaN, which a probability of 0 does not cancel.

    ``columns`` at a time, as the accumulator leaves few registers.
    """

    @pl.loop(0, v_s.shape[1] // columns)
    def _(i: jax.Array) -> None:
        part = v_s.at[:, pl.ds(pl.multiple_of(i * columns, columns), columns)]
        key = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where((key >= first) & (key < end), part[...], jnp.zeros((), v_s.dtype))

    plgpu.commit_smem()


def _widen(tile_s: Any, wide_s: Any, columns: int) -> Any:
    """A float8 tile converted to what wgmma multiplies, in ``wide_s``; ``columns`` at a time."""

    @pl.loop(0, wide_s.shape[1] // columns)
    def _(i: jax.Array) -> None:
        part = pl.ds(pl.multiple_of(i * columns, columns), columns)
        wide_s[:, part] = tile_s[:, part].astype(wide_s.dtype)

    plgpu.commit_smem()
    return wide_s


def _staged(weights: jax.Array, p_s: Any | None) -> Any:
    if p_s is None:
        return weights
    p_s[...] = weights
    plgpu.commit_smem()
    return p_s


def _add_values(accumulator: jax.Array, weights: Any, v_s: Any, in_place: bool) -> jax.Array:
    if not in_place:  # the interpreter has no accumulator that begins with a value
        return accumulator + _product(weights, v_s)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_s))(plgpu.ACC.init(accumulator))


def _store(state: _State, v_scale: jax.Array | float, out_s: Any, lse_s: Any) -> None:
    """The result and its logsumexp to shared memory. An item has a visible key, so no denominator is 0."""
    out_s[...] = state.accumulator * _over_columns(v_scale / state.denominator, out_s.shape[1])
    lse_s[...] = state.maximum + jnp.log2(state.denominator)


def combine_items(
    partials: jax.Array,
    logsumexps: jax.Array,
    work: WorkPlan,
    sinks: jax.Array | None,
    shape: tuple[int, ...],
    dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Merges each row's partials as ``attend_items`` gives them; ``[R, N, H]`` = ``shape``, zeros for an empty row."""
    num_rows, num_heads, head_dim = shape
    group = num_heads // partials.shape[1]
    row_items = PackedArray.of(work.row_items)
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        partial(_combine_kernel, group=group, row_items_start=row_items.start, has_sinks=sinks is not None),
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), dtype),
        grid=(num_rows, num_heads),
        grid_names=("row", "head"),
        scratch_types=[plgpu.SMEM((partials.shape[3],), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_combine",
        **interpret_option(interpret),
    )
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    return kernel(partials, logsumexps, row_items.vector, *extra)


def _combine_kernel(
    partial_g: Any, lse_g: Any, row_items_g: Any, *refs: Any, group: int, row_items_start: int, has_sinks: bool
) -> None:
    *sinks_g, out_g, out_s = refs
    row, head = lax.axis_index("row"), lax.axis_index("head")
    kv_head, member = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
    first, end = row_items_g[row_items_start + row], row_items_g[row_items_start + row + 1]
    width = partial_g.shape[3]

    def vector(x: float) -> jax.Array:
        return jnp.full((width,), x, jnp.float32)

    def step(item: jax.Array, carry: Any) -> Any:
        maximum, denominator, total = carry
        lse = lse_g[item, kv_head, member]
        new_maximum = jnp.maximum(maximum, lse)
        decay, weight = jnp.exp2(maximum - new_maximum), jnp.exp2(lse - new_maximum)
        result = partial_g[item, kv_head, member]
        return new_maximum, denominator * decay + weight, total * decay + result * weight

    if has_sinks:
        start = (sinks_g[0][head] * LOG2_E, jnp.float32(1.0))
    else:
        start = (jnp.float32(LOWEST_MAX), jnp.float32(0.0))
    _, denominator, total = lax.fori_loop(first, end, step, (*start, vector(0.0)))
    # An empty row has nothing to divide: its total is 0.
    out_s[...] = (total / jnp.where(denominator == 0.0, 1.0, denominator)).astype(out_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, out_g.shape[2])], out_g.at[row, head])
    plgpu.wait_smem_to_gmem(0)
