"""Mixed attention as a Pallas Mosaic kernel for Hopper.

Query tiles (``work.py``) times pairs of heads are the work. Programs stay resident, one per multiprocessor, and take
items in turn. In each, one warpgroup fetches: queries, then one TMA per KV block of the row's block table, a few tiles
ahead. Two warpgroups compute, with 64 queries each: the same tokens of two heads that share a KV head, or, where the
group is odd, neighbouring tokens of one head. They walk from the diagonal back to the first visible key, so that the
tiles that need a mask come first (and, with a window, last), and take turns on the tensor cores: while one multiplies,
the other computes its softmax, the idea of FlashAttention-3 (Shah et al., 2024).
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

from ..attention_common import LOWEST_MAX, MASK_VALUE, AttentionOptions, visible
from .config import MosaicTuningConfig
from .work import ALIGNMENT, FIRST_TOKEN, NUM_KEYS, NUM_TOKENS, ROW, SEQ_LEN, TilePlan

WG_QUERIES = 64
"""Queries per compute warpgroup: the M of wgmma."""
COMPUTE_WGS = 2
MAX_COLUMNS = 128
COMPUTE_REGISTERS, FETCH_REGISTERS = 216, 72
"""Per thread, multiples of 8; three warpgroups share 512 - 8."""
EDGE_WIDTH = 64
"""Elements of a query's output that the staging area of incomplete tiles holds at a time: the 128 bytes at which a TMA
may start."""
LOG2E = math.log2(math.e)

Ref = Any
"""A Pallas reference."""


class _Split(NamedTuple):
    """What an item's two compute warpgroups share out; one of these is 2, the others 1."""

    heads: int
    tokens: int
    columns: int


def _split(group: int, head_dim: int) -> _Split:
    """A warpgroup has registers for a sum of 64 x 128. A wider head is halved by columns: then both warpgroups compute
    all scores, half as much work again. Else two heads, for finer tiles along the diagonal, if the group is even."""
    if head_dim > MAX_COLUMNS:
        return _Split(heads=1, tokens=1, columns=COMPUTE_WGS)
    if group % COMPUTE_WGS:
        return _Split(heads=1, tokens=COMPUTE_WGS, columns=1)
    return _Split(heads=COMPUTE_WGS, tokens=1, columns=1)


@dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised on."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any
    options: AttentionOptions
    has_sinks: bool
    tuning: MosaicTuningConfig

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def split(self) -> "_Split":
        return _split(self.group, self.head_dim)

    @property
    def slices(self) -> int:
        """Items per tile."""
        return self.num_heads // self.split.heads

    @property
    def value_dim(self) -> int:
        """Columns of the values, and of the output, that a warpgroup works on."""
        return self.head_dim // self.split.columns

    @property
    def tile_blocks(self) -> int:
        return self.tuning.tile_kv // self.block_size

    @property
    def transforms(self) -> tuple:
        swizzle = 128 if self.head_dim % 64 == 0 else 64
        return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


class _Refs(NamedTuple):
    """Global memory (q … out), shared memory and barriers."""

    q: Ref  # [T, N, H]
    kv: Ref  # [B, 2, K, S, H]
    tables: Ref  # i32 [R, max_blocks]
    tiles: Ref  # i32 [W, 5]
    num_tiles: Ref  # i32 [1]
    sinks: Ref  # f32 [N]
    out: Ref  # [T, N, H]
    q_smem: Ref  # [2, H / value_dim, 64, value_dim]; in the end the first part is the output's
    k_smem: Ref  # [stages, tile_kv, H]
    v_smem: Ref  # [stages, tile_kv, H]
    edge_smem: Ref  # [2, 64, 64]
    p_smem: Ref | None  # [2, 64, tile_kv]
    q_full: Ref
    q_empty: Ref
    k_full: Ref  # [stages]
    k_empty: Ref  # [stages]
    v_full: Ref  # [stages]
    v_empty: Ref  # [stages]
    v_raw: Ref
    turn: Ref


class _Item(NamedTuple):
    """One tile and head slice. Positions and keys are counted in the row's sequence; KV tiles start at multiples of
    tile_kv. Turn i is about KV tile ``last_tile - i``."""

    row: jax.Array
    first_token: jax.Array
    num_tokens: jax.Array
    first_pos: jax.Array
    seq_len: jax.Array
    head: jax.Array  # of warpgroup 0
    first_block: jax.Array  # no block outside first … last is read
    last_block: jax.Array
    last_tile: jax.Array
    num_turns: jax.Array
    diagonal_turns: jax.Array  # the turns before this one need a mask
    window_turn: jax.Array  # the turns from this one on need a mask


class _WarpgroupRows(NamedTuple):
    """The 64 rows of one compute warpgroup, of which ``num_rows`` from ``first_row`` on are its queries."""

    head: jax.Array
    start: jax.Array  # the token of row 0
    first_row: jax.Array
    num_rows: jax.Array
    first_pos: jax.Array  # of row 0; may be negative


class _Softmax(NamedTuple):
    maximum: jax.Array  # f32 [64], of scores times log2(e)
    denominator: jax.Array  # f32 [64]
    accumulator: jax.Array  # f32 [64, H]


def tile_tokens(group: int, head_dim: int) -> int:
    """Query tokens per tile of ``work.plan_tiles``."""
    return WG_QUERIES * _split(group, head_dim).tokens


def attend_tiles(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    plan: TilePlan,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tuning: MosaicTuningConfig,
    interpret: Any = None,
) -> jax.Array:
    """The tokens of the planned tiles; other tokens (rows of one query) hold anything. Shapes as in
    ``ragged_paged_attention``."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    padding = max(WG_QUERIES - num_tokens, -num_tokens % ALIGNMENT)  # a warpgroup reads 64 rows
    if padding:
        q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    shape = _Shape(
        num_tokens=q.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=q.dtype,
        options=options,
        has_sinks=sinks is not None,
        tuning=tuning,
    )
    sinks = jnp.zeros(num_heads, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = plgpu.kernel(
        partial(_kernel, shape=shape),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tuning.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return call(q, kv, block_tables, plan.tiles, plan.num_tiles, sinks)[:num_tokens]


def _scratch(shape: _Shape) -> tuple:
    tile_kv, stages = shape.tuning.tile_kv, shape.tuning.stages
    smem = partial(plgpu.SMEM, dtype=shape.dtype, transforms=shape.transforms)
    p_transforms = (plgpu.TilingTransform((8, shape.transforms[0].tiling[1])), shape.transforms[1])
    p_smem = plgpu.SMEM((COMPUTE_WGS, WG_QUERIES, tile_kv), shape.dtype, transforms=p_transforms)
    per_stage = partial(plgpu.Barrier, num_barriers=stages)
    return (
        smem((COMPUTE_WGS, shape.split.columns, WG_QUERIES, shape.value_dim)),
        smem((stages, tile_kv, shape.head_dim)),
        smem((stages, tile_kv, shape.head_dim)),
        plgpu.SMEM((COMPUTE_WGS, WG_QUERIES, EDGE_WIDTH), shape.dtype),
        p_smem if shape.tuning.stage_p_in_smem else None,
        plgpu.Barrier(num_arrivals=COMPUTE_WGS * shape.split.columns),
        plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        per_stage(num_arrivals=shape.tile_blocks),
        per_stage(num_arrivals=COMPUTE_WGS),
        per_stage(num_arrivals=shape.tile_blocks),
        per_stage(num_arrivals=COMPUTE_WGS),
        plgpu.Barrier(num_arrivals=shape.tile_blocks),
        plgpu.Barrier(num_arrivals=COMPUTE_WGS),
    )


def _kernel(*args: Ref, shape: _Shape) -> None:
    refs = _Refs(*args)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTE_WGS)
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _for_each_item(refs, shape, partial(_compute_item, refs, shape, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTE_WGS)
    def fetch() -> None:
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        _for_each_item(refs, shape, partial(_fetch_item, refs, shape))


def _take_turn(refs: _Refs) -> None:
    """Both warpgroups meet; they start one meeting apart, so each works where the other is half a turn away."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _for_each_item(refs: _Refs, shape: _Shape, body: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
    """Calls ``body(place, items so far, turns so far)`` for this program's items, ``place`` being the item's number.

    Items are dealt out back and forth over the programs, dearest first, so that their sums come out about equal.
    """
    num_ctas = shape.tuning.num_ctas
    cta = lax.axis_index("cta")
    num_items = refs.num_tiles[0] * shape.slices

    def round_(index: jax.Array, turns: jax.Array) -> jax.Array:
        place = index * num_ctas + jnp.where(index % 2 == 0, cta, num_ctas - 1 - cta)
        is_real = place < num_items
        place = jnp.where(is_real, place, 0)
        pl.when(is_real)(lambda: body(place, index, turns))
        return turns + jnp.where(is_real, _load_item(refs, shape, place).num_turns, 0)

    lax.fori_loop(0, pl.cdiv(num_items, num_ctas), round_, jnp.int32(0))


def _load_item(refs: _Refs, shape: _Shape, place: jax.Array) -> _Item:
    tile_kv, window = shape.tuning.tile_kv, shape.options.window
    tile, slice_ = place // shape.slices, place % shape.slices
    num_tokens, num_keys = refs.tiles[tile, NUM_TOKENS], refs.tiles[tile, NUM_KEYS]
    first_pos = num_keys - num_tokens
    first_key = jnp.int32(0) if window is None else jnp.maximum(first_pos - window + 1, 0)
    first_tile, last_tile = first_key // tile_kv, (num_keys + tile_kv - 1) // tile_kv - 1
    num_turns = jnp.where(num_keys == 0, 0, last_tile - first_tile + 1)
    below_diagonal = (first_pos + 1) // tile_kv  # KV tiles that all queries see to the end
    inside_window = first_tile if window is None else (jnp.maximum(num_keys - window, 0) + tile_kv - 1) // tile_kv
    diagonal_turns = jnp.clip(last_tile + 1 - below_diagonal, 0, num_turns)
    return _Item(
        row=refs.tiles[tile, ROW],
        first_token=refs.tiles[tile, FIRST_TOKEN],
        num_tokens=num_tokens,
        first_pos=first_pos,
        seq_len=refs.tiles[tile, SEQ_LEN],
        head=slice_ * shape.split.heads,
        first_block=first_key // shape.block_size,
        last_block=jnp.maximum(num_keys - 1, 0) // shape.block_size,
        last_tile=last_tile,
        num_turns=num_turns,
        diagonal_turns=diagonal_turns,
        window_turn=jnp.clip(last_tile + 1 - inside_window, diagonal_turns, num_turns),
    )


def _warpgroup_rows(shape: _Shape, item: _Item, warpgroup: jax.Array | int) -> _WarpgroupRows:
    """The last tokens of q are reached by starting earlier: 64 rows from any other start would leave q."""
    groups = WG_QUERIES // ALIGNMENT
    wanted = item.first_token // ALIGNMENT  # in groups of rows, so that the compiler sees the alignment
    if shape.split.tokens > 1:
        wanted = wanted + warpgroup * groups
    start = jnp.minimum(wanted, shape.num_tokens // ALIGNMENT - groups) * ALIGNMENT
    first = jnp.maximum(item.first_token, wanted * ALIGNMENT)
    end = jnp.minimum(item.first_token + item.num_tokens, wanted * ALIGNMENT + WG_QUERIES)
    return _WarpgroupRows(
        head=item.head + (warpgroup if shape.split.heads > 1 else 0),
        start=start,
        first_row=first - start,
        num_rows=jnp.maximum(end - first, 0),
        first_pos=item.first_pos + start - item.first_token,
    )


def _fetch_item(refs: _Refs, shape: _Shape, place: jax.Array, index: jax.Array, turns: jax.Array) -> None:
    item = _load_item(refs, shape, place)
    stages, tile_blocks, block_size = shape.tuning.stages, shape.tile_blocks, shape.block_size
    pl.when(index > 0)(lambda: plgpu.barrier_wait(refs.q_empty))
    for warpgroup in range(COMPUTE_WGS):
        rows = _warpgroup_rows(shape, item, warpgroup)
        for part in range(shape.split.columns):
            columns = pl.ds(part * shape.value_dim, shape.value_dim)
            source = refs.q.at[pl.ds(rows.start, WG_QUERIES), rows.head, columns]
            plgpu.copy_gmem_to_smem(source, refs.q_smem.at[warpgroup, part], refs.q_full)
    kv_head = item.head // shape.group

    def fetch_tile(turn: jax.Array, _: None) -> None:
        slot = (turns + turn) % stages
        is_reused = turns + turn >= stages
        tile = item.last_tile - turn
        places = [jnp.clip(tile * tile_blocks + b, item.first_block, item.last_block) for b in range(tile_blocks)]
        blocks = [refs.tables[item.row, place] for place in places]

        def copy(index: int, smem: Ref, barrier: Ref) -> None:
            for b, block in enumerate(blocks):
                target = smem.at[slot, pl.ds(b * block_size, block_size)]
                plgpu.copy_gmem_to_smem(refs.kv.at[block, index, kv_head], target, barrier)

        def copy_and_clear() -> None:
            copy(1, refs.v_smem, refs.v_raw)
            plgpu.barrier_wait(refs.v_raw)
            _clear_unwritten(refs, shape, item, slot, tile * shape.tuning.tile_kv)
            for _ in blocks:
                plgpu.barrier_arrive(refs.v_full.at[slot])

        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.k_empty.at[slot]))
        copy(0, refs.k_smem, refs.k_full.at[slot])
        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.v_empty.at[slot]))
        is_partial = (turn == 0) & ((tile + 1) * shape.tuning.tile_kv > item.seq_len)
        pl.when(is_partial)(copy_and_clear)
        pl.when(jnp.logical_not(is_partial))(lambda: copy(1, refs.v_smem, refs.v_full.at[slot]))

    lax.fori_loop(0, item.num_turns, fetch_tile, None)


def _clear_unwritten(refs: _Refs, shape: _Shape, item: _Item, slot: jax.Array, first_key: jax.Array) -> None:
    """Zeros the values that belong to no key: a probability of 0 times NaN would be NaN. In small pieces, because the
    fetching warpgroup has few registers, and here, because the computing ones have none to spare."""
    width = shape.transforms[0].tiling[1]
    row = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA)
    for chunk in range(0, shape.tuning.tile_kv, 64):
        key = first_key + chunk + row
        is_written = (key < item.seq_len) & (key >= item.first_block * shape.block_size)
        for column in range(0, shape.head_dim, width):
            values = refs.v_smem.at[slot, pl.ds(chunk, 64), pl.ds(column, width)]
            old = plgpu.layout_cast(values[...], plgpu.Layout.WGMMA)
            values[...] = jnp.where(is_written, old, jnp.zeros_like(old))
    plgpu.commit_smem()


def _compute_item(
    refs: _Refs, shape: _Shape, warpgroup: jax.Array, place: jax.Array, index: jax.Array, turns: jax.Array
) -> None:
    item = _load_item(refs, shape, place)
    rows = _warpgroup_rows(shape, item, warpgroup)
    plgpu.barrier_wait(refs.q_full)
    pl.when(warpgroup == 1)(partial(_take_turn, refs))
    body = partial(_turn, refs, shape, warpgroup, item, rows, turns)
    state = _start(refs, shape, rows)
    state = lax.fori_loop(0, item.diagonal_turns, partial(body, masked=True), state)
    state = lax.fori_loop(item.diagonal_turns, item.window_turn, partial(body, masked=False), state)
    if shape.options.window is not None:
        state = lax.fori_loop(item.window_turn, item.num_turns, partial(body, masked=True), state)
    # Once an item, not once a program: the queries of the next item wait for both.
    pl.when(warpgroup == 0)(partial(_take_turn, refs))

    denominator = jnp.where(state.denominator == 0.0, 1.0, state.denominator)
    result = state.accumulator * lax.broadcast_in_dim(1.0 / denominator, state.accumulator.shape, [0])
    # What the loop does not need is read again, not kept in registers meanwhile.
    rows = _warpgroup_rows(shape, _load_item(refs, shape, place), warpgroup)
    _store(refs, shape, warpgroup, rows, result.astype(shape.dtype))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.q_empty)


def _start(refs: _Refs, shape: _Shape, rows: _WarpgroupRows) -> _Softmax:
    per_row, full = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    maximum = refs.sinks[rows.head] * LOG2E if shape.has_sinks else jnp.float32(LOWEST_MAX)
    denominator = jnp.float32(1.0 if shape.has_sinks else 0.0)
    return _Softmax(
        plgpu.layout_cast(jnp.full((WG_QUERIES,), maximum, jnp.float32), per_row),
        plgpu.layout_cast(jnp.full((WG_QUERIES,), denominator, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((WG_QUERIES, shape.value_dim), jnp.float32), full),
    )


def _turn(
    refs: _Refs,
    shape: _Shape,
    warpgroup: jax.Array,
    item: _Item,
    rows: _WarpgroupRows,
    turns: jax.Array,
    turn: jax.Array,
    state: _Softmax,
    masked: bool,
) -> _Softmax:
    """One KV tile: scores, softmax, values."""
    tile_kv = shape.tuning.tile_kv
    slot = (turns + turn) % shape.tuning.stages
    first_key = (item.last_tile - turn) * tile_kv
    plgpu.barrier_wait(refs.k_full.at[slot])

    def multiply(acc_ref: Ref) -> jax.Array:
        for part in range(shape.split.columns):
            columns = pl.ds(part * shape.value_dim, shape.value_dim)
            plgpu.wgmma(acc_ref, refs.q_smem.at[warpgroup, part], refs.k_smem.at[slot, :, columns].T)
        _take_turn(refs)
        return acc_ref[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((WG_QUERIES, tile_kv), jnp.float32))
    plgpu.barrier_arrive(refs.k_empty.at[slot])
    scores, factor = _scaled(scores, shape.options)
    if masked:
        scores = jnp.where(_visible(shape, rows, first_key), scores, MASK_VALUE)

    maximum = jnp.maximum(state.maximum, scores.max(axis=1) * factor)
    decay = jnp.exp2(state.maximum - maximum)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(maximum, scores.shape, [0]))
    denominator = state.denominator * decay + probs.sum(axis=1)
    accumulator = state.accumulator * lax.broadcast_in_dim(decay, state.accumulator.shape, [0])
    probs = probs.astype(shape.dtype)
    if shape.tuning.stage_p_in_smem:
        refs.p_smem.at[warpgroup][...] = probs
        plgpu.commit_smem()

    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.v_full.at[slot])
    plgpu.barrier_wait(refs.turn)
    accumulator = _add_values(refs, shape, warpgroup, slot, probs, accumulator)
    plgpu.barrier_arrive(refs.v_empty.at[slot])
    return _Softmax(maximum, denominator, accumulator)


def _scaled(scores: jax.Array, options: AttentionOptions) -> tuple[jax.Array, float]:
    """Scores and a positive factor that they lack: it joins the subtraction of the maximum in one instruction. The
    factor includes log2(e), because exp2 is what the hardware has."""
    if options.softcap is not None:
        return jnp.tanh(scores * (options.scale / options.softcap)), options.softcap * LOG2E
    if options.scale > 0:
        return scores, options.scale * LOG2E
    return scores * options.scale, LOG2E


def _visible(shape: _Shape, rows: _WarpgroupRows, first_key: jax.Array) -> jax.Array:
    tile = (WG_QUERIES, shape.tuning.tile_kv)
    row, column = (plgpu.broadcasted_iota(jnp.int32, tile, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
    # Sums that change from turn to turn, so that the compiler does not keep 64 of them in registers.
    query_pos, key_pos = row + rows.first_pos, column + first_key
    return visible(query_pos, key_pos, shape.options.window)


def _add_values(
    refs: _Refs, shape: _Shape, warpgroup: jax.Array, slot: jax.Array, probs: jax.Array, accumulator: jax.Array
) -> jax.Array:
    values = refs.v_smem.at[slot, :, _columns(shape, warpgroup)]
    if not shape.tuning.stage_p_in_smem:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, probs, values))(plgpu.ACC.init(accumulator))

    def multiply(acc_ref: Ref) -> jax.Array:
        plgpu.wgmma(acc_ref, refs.p_smem.at[warpgroup], values)
        return acc_ref[...]

    return accumulator + pl.run_scoped(multiply, plgpu.ACC(accumulator.shape, jnp.float32))


def _columns(shape: _Shape, warpgroup: jax.Array) -> Any:
    first = warpgroup * shape.value_dim if shape.split.columns > 1 else 0
    return pl.ds(first, shape.value_dim)


def _store(refs: _Refs, shape: _Shape, warpgroup: jax.Array, rows: _WarpgroupRows, result: jax.Array) -> None:
    """Writes this warpgroup's queries and no other token. ``result`` is ``[64, H]``."""
    is_full = rows.num_rows == WG_QUERIES

    @pl.when(is_full)
    def store_all() -> None:
        staged = refs.q_smem.at[warpgroup, 0]
        staged[...] = result
        plgpu.commit_smem()
        tokens = pl.ds(rows.start, WG_QUERIES)
        plgpu.copy_smem_to_gmem(staged, refs.out.at[tokens, rows.head, _columns(shape, warpgroup)])

    @pl.when(jnp.logical_not(is_full))
    def store_some() -> None:
        staged = refs.edge_smem.at[warpgroup]
        # The last of a head_dim that is no multiple overlaps the one before: the same values once more.
        for first in range(0, shape.value_dim, EDGE_WIDTH):
            column = min(first, shape.value_dim - EDGE_WIDTH)
            if column:
                plgpu.wait_smem_to_gmem(0)
            staged[...] = result[:, column : column + EDGE_WIDTH]
            plgpu.commit_smem()
            if shape.split.columns > 1:
                column = column + warpgroup * shape.value_dim
            _store_rows(staged, refs.out.at[:, rows.head, pl.ds(column, EDGE_WIDTH)], rows)


def _store_rows(staged: Ref, out: Ref, rows: _WarpgroupRows) -> None:
    """Copies ``staged`` ``[64, columns]`` to ``out`` ``[T, columns]``, in pieces of 32, 16, … 1 rows, as the bits of
    their number say."""
    token = rows.start + rows.first_row
    size = WG_QUERIES // 2
    while size:

        @pl.when(rows.num_rows & size != 0)
        def store_piece(size: int = size) -> None:
            done = rows.num_rows & ~(2 * size - 1)
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(rows.first_row + done, size)], out.at[pl.ds(token + done, size)])

        size //= 2
