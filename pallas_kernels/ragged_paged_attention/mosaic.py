"""Mixed attention as a Pallas Mosaic kernel for Hopper.

Query tiles (``work.py``) times pairs of heads are the work. Programs stay resident, one per multiprocessor, and take
items in turn. In each, one warpgroup fetches: queries, then one TMA per KV block of the row's block table, a few tiles
ahead. Two warpgroups compute, with 64 queries each: the same tokens of two heads that share a KV head, or, where the
group is odd, neighbouring tokens of one head; of a head wider than 128 columns, each half of the values. They walk from
the diagonal back to the first visible key, so that the tiles that need a mask come first (and, with a window, last),
and take turns on the tensor cores: while one multiplies, the other computes its softmax, the idea of FlashAttention-3
(Shah et al., 2024). Of a float8 pool, the fetching warpgroup also widens what it fetched (``widen.py``).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention_common import LOWEST_MAX, MASK_VALUE, AttentionOptions, attend_scaled, visible
from ..compat import interpret_option
from ..float8 import FLOAT8
from ..packed_array import PackedArray
from ..paged_attention import paged_attention
from .config import MosaicTuningConfig
from .items import Item, KernelShape, Ref, Refs, WarpgroupRows, for_each_item, load_item, warpgroup_rows
from .widen import fetch_widened
from .work import ALIGNMENT, COMPUTE_WGS, WG_QUERIES, MixedWorkPlan, TilePlan

COMPUTE_REGISTERS, FETCH_REGISTERS = 216, 72
"""Per thread, multiples of 8; three warpgroups share 512 - 8."""
EDGE_WIDTH = 64
"""Elements of a query's output that the staging area of incomplete tiles holds at a time: the 128 bytes at which a TMA
may start."""
LOG2E = math.log2(math.e)


class _Softmax(NamedTuple):
    maximum: jax.Array  # f32 [64], of scores times log2(e)
    denominator: jax.Array  # f32 [64]
    accumulator: jax.Array  # f32 [64, H]


def ragged_paged_attention_mosaic(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    work: MixedWorkPlan,
    options: AttentionOptions,
    tuning: MosaicTuningConfig,
    interpret: Any = None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """Shapes as in ``ragged_paged_attention``, within what ``dispatch.check_mosaic_shapes`` accepts.

    Rows with one query token go through ``paged_attention``, the others through this package's kernel. Over a float8
    pool it works in float16, which holds all float8 values and to which the hardware converts at once; the scales of
    keys and values are applied to queries and results.
    """

    def attend(q: jax.Array) -> jax.Array:
        q = q.astype(jnp.float16 if kv.dtype == FLOAT8 else kv.dtype)
        return attend_tiles(q, kv, block_tables, work.tiles, sinks, options, tuning, interpret)

    out = attend_scaled(attend, q, kv_scales).astype(q.dtype)
    single_out = paged_attention(
        q.at[work.single_tokens].get(mode="clip"),
        kv,
        block_tables,
        seq_lens,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        sinks=sinks,
        implementation="mosaic",
        interpret=interpret,
        kv_scales=kv_scales,
        work=work.singles,
    )
    return out.at[work.single_tokens].set(single_out, mode="drop")


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
    tiles, num_tiles = PackedArray.of(plan.tiles), PackedArray.of(plan.num_tiles)
    shape = KernelShape(
        num_tokens=q.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=q.dtype,
        kv_dtype=kv.dtype,
        options=options,
        has_sinks=sinks is not None,
        tuning=tuning,
        tiles_start=tiles.start,
        num_tiles_start=num_tiles.start,
    )
    call = plgpu.kernel(
        partial(_kernel, shape=shape),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tuning.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="warpgroup",
        kernel_name="ragged_paged_attention",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpret_option(interpret),
    )
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    return call(q, kv, block_tables, tiles.vector, num_tiles.vector, *extra)[:num_tokens]


def _scratch(shape: KernelShape) -> tuple:
    tile_kv, stages = shape.tuning.tile_kv, shape.tuning.stages
    smem = partial(plgpu.SMEM, dtype=shape.dtype, transforms=shape.transforms)
    p_smem = plgpu.SMEM((COMPUTE_WGS, WG_QUERIES, tile_kv), shape.dtype, transforms=shape.transforms)
    raw = (shape.tuning.raw_stages if shape.widens else 1, tile_kv, shape.head_dim)
    # A widened tile is one arrival, a tile that comes as it is one of each block.
    arrivals = 1 if shape.widens else shape.tile_blocks
    per_stage = partial(plgpu.Barrier, num_barriers=stages)
    return (
        smem((COMPUTE_WGS, shape.split.columns, WG_QUERIES, shape.value_dim)),
        smem((stages, tile_kv, shape.head_dim)),
        smem((stages, tile_kv, shape.head_dim)),
        plgpu.SMEM(raw, shape.kv_dtype, transforms=shape.raw_transforms) if shape.widens else None,
        plgpu.SMEM((COMPUTE_WGS, WG_QUERIES, EDGE_WIDTH), shape.dtype),
        p_smem if shape.tuning.stage_p_in_smem else None,
        plgpu.Barrier(num_arrivals=COMPUTE_WGS * shape.split.columns),
        plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        per_stage(num_arrivals=arrivals),
        per_stage(num_arrivals=COMPUTE_WGS),
        per_stage(num_arrivals=arrivals),
        per_stage(num_arrivals=COMPUTE_WGS),
        plgpu.Barrier(num_arrivals=shape.tile_blocks, num_barriers=raw[0]),
        plgpu.Barrier(num_arrivals=COMPUTE_WGS),
    )


def _kernel(*args: Ref, shape: KernelShape) -> None:
    inputs, rest = args[:5], args[5:]
    refs = Refs(*inputs, *(rest if shape.has_sinks else (None, *rest)))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTE_WGS)
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for_each_item(refs, shape, partial(_compute_item, refs, shape, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTE_WGS)
    def fetch() -> None:
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        totals = for_each_item(refs, shape, partial(_fetch_item, refs, shape))
        if shape.tuning.stage_p_in_smem:
            _await_release(refs, shape, *totals)


def _take_turn(refs: Refs) -> None:
    """Both warpgroups meet; they start one meeting apart, so each works where the other is half a turn away."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _fetch_item(refs: Refs, shape: KernelShape, place: jax.Array, index: jax.Array, turns: jax.Array) -> jax.Array:
    item = load_item(refs, shape, place)
    stages, tile_blocks, block_size = shape.tuning.stages, shape.tile_blocks, shape.block_size
    pl.when(index > 0)(lambda: plgpu.barrier_wait(refs.q_empty))
    for warpgroup in range(COMPUTE_WGS):
        rows = warpgroup_rows(shape, item, warpgroup)
        for part in range(shape.split.columns):
            columns = pl.ds(part * shape.value_dim, shape.value_dim)
            source = refs.q.at[pl.ds(rows.start, WG_QUERIES), rows.head, columns]
            plgpu.copy_gmem_to_smem(source, refs.q_smem.at[warpgroup, part], refs.q_full)
    kv_head = item.head // shape.group
    if shape.widens:
        fetch_widened(refs, shape, item, turns, _clear_unwritten)
        return turns + item.num_turns

    def fetch_tile(turn: jax.Array, _: None) -> None:
        slot = lax.rem(turn, stages)
        is_reused = turn >= stages
        tile = item.last_tile - (turn - turns)
        places = [jnp.clip(tile * tile_blocks + b, item.first_block, item.last_block) for b in range(tile_blocks)]
        blocks = [refs.tables[item.row, place] for place in places]

        def copy(index: int, smem: Ref, barrier: Ref) -> None:
            for b, block in enumerate(blocks):
                target = smem.at[slot, pl.ds(b * block_size, block_size)]
                plgpu.copy_gmem_to_smem(refs.kv.at[block, index, kv_head], target, barrier)

        def copy_and_clear() -> None:
            raw_full = refs.raw_full.at[0]
            copy(1, refs.v_smem, raw_full)
            plgpu.barrier_wait(raw_full)
            _clear_unwritten(refs, shape, item, slot, tile * shape.tuning.tile_kv)
            for _ in blocks:
                plgpu.barrier_arrive(refs.v_full.at[slot])

        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.k_empty.at[slot]))
        copy(0, refs.k_smem, refs.k_full.at[slot])
        pl.when(is_reused)(partial(plgpu.barrier_wait, refs.v_empty.at[slot]))
        is_partial = (turn == turns) & ((tile + 1) * shape.tuning.tile_kv > item.seq_len)
        pl.when(is_partial)(copy_and_clear)
        pl.when(jnp.logical_not(is_partial))(lambda: copy(1, refs.v_smem, refs.v_full.at[slot]))

    lax.fori_loop(turns, turns + item.num_turns, fetch_tile, None)
    return turns + item.num_turns


def _await_release(refs: Refs, shape: KernelShape, items: jax.Array, turns: jax.Array) -> None:
    """Waits until the last stages are free again. Nobody needs them then; but the interpreter of JAX 0.11 insists that
    a warpgroup that waits on a barrier at all sees its last phase."""
    pl.when(items > 0)(partial(plgpu.barrier_wait, refs.q_empty))
    for slot in range(shape.tuning.stages):
        for barrier in (refs.k_empty, refs.v_empty):
            pl.when(turns > slot)(partial(plgpu.barrier_wait, barrier.at[slot]))


def _clear_unwritten(refs: Refs, shape: KernelShape, item: Item, slot: jax.Array, first_key: jax.Array) -> None:
    """Zeros the values that belong to no key: a probability of 0 times NaN would be NaN. In small pieces, because the
    fetching warpgroup has few registers, and here, because the computing ones have none to spare."""
    width = shape.slice_columns
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
    refs: Refs, shape: KernelShape, warpgroup: jax.Array, place: jax.Array, index: jax.Array, turns: jax.Array
) -> jax.Array:
    item = load_item(refs, shape, place)
    rows = warpgroup_rows(shape, item, warpgroup)
    plgpu.barrier_wait(refs.q_full)
    pl.when(warpgroup == 1)(partial(_take_turn, refs))
    state = _start(refs, shape, rows)
    # Turns are numbered through all items, as the stages of the KV tiles go on from item to item.
    body = partial(_turn, refs, shape, warpgroup, rows, (item.last_tile + turns) * shape.tuning.tile_kv)
    diagonal, window = turns + item.diagonal_turns, turns + item.window_turn
    turns = turns + item.num_turns
    state = lax.fori_loop(turns - item.num_turns, diagonal, partial(body, masked=True), state)
    state = lax.fori_loop(diagonal, window, partial(body, masked=False), state)
    if shape.options.window is not None:
        state = lax.fori_loop(window, turns, partial(body, masked=True), state)
    # Once an item, not once a program: the queries of the next item wait for both.
    pl.when(warpgroup == 0)(partial(_take_turn, refs))

    denominator = jnp.where(state.denominator == 0.0, 1.0, state.denominator)
    result = state.accumulator * lax.broadcast_in_dim(1.0 / denominator, state.accumulator.shape, [0])
    # What the loop does not need is read again, not kept in registers meanwhile.
    rows = warpgroup_rows(shape, load_item(refs, shape, place), warpgroup)
    _store(refs, shape, warpgroup, rows, result.astype(shape.dtype))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.q_empty)
    return turns


def _start(refs: Refs, shape: KernelShape, rows: WarpgroupRows) -> _Softmax:
    per_row, full = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    maximum = refs.sinks[rows.head] * LOG2E if shape.has_sinks else jnp.float32(LOWEST_MAX)
    denominator = jnp.float32(1.0 if shape.has_sinks else 0.0)
    return _Softmax(
        plgpu.layout_cast(jnp.full((WG_QUERIES,), maximum, jnp.float32), per_row),
        plgpu.layout_cast(jnp.full((WG_QUERIES,), denominator, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((WG_QUERIES, shape.value_dim), jnp.float32), full),
    )


def _turn(
    refs: Refs,
    shape: KernelShape,
    warpgroup: jax.Array,
    rows: WarpgroupRows,
    key_base: jax.Array,
    turn: jax.Array,
    state: _Softmax,
    masked: bool,
) -> _Softmax:
    """One KV tile: scores, softmax, values."""
    tile_kv = shape.tuning.tile_kv
    slot = lax.rem(turn, shape.tuning.stages)
    first_key = key_base - turn * tile_kv
    plgpu.barrier_wait(refs.k_full.at[slot])

    def multiply_part(acc_ref: Ref, part: jax.Array, _: None) -> None:
        columns = pl.ds(part * shape.value_dim, shape.value_dim)
        plgpu.wgmma(acc_ref, refs.q_smem.at[warpgroup, part], refs.k_smem.at[slot, :, columns].T)

    def multiply(acc_ref: Ref) -> jax.Array:
        # Not unrolled: the addresses of all parts at once would take the registers of the scores.
        lax.fori_loop(0, shape.split.columns, partial(multiply_part, acc_ref), None)
        _take_turn(refs)
        return acc_ref[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((WG_QUERIES, tile_kv), jnp.float32))
    plgpu.barrier_arrive(refs.k_empty.at[slot])
    scores, factor = _scaled(scores, shape.options)
    if masked:
        # Far below LOWEST_MAX once multiplied: a row that sees no key of this tile must not take its maximum from it.
        scores = jnp.where(_visible(shape, rows, first_key), scores, MASK_VALUE / factor)

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
        scores, factor = jnp.tanh(scores * (options.scale / options.softcap)), options.softcap * LOG2E
    else:
        factor = options.scale * LOG2E
    # Not for a factor by which masked scores would have to be divided out of float32's range.
    return (scores, factor) if factor > 1e-6 else (scores * factor, 1.0)


def _visible(shape: KernelShape, rows: WarpgroupRows, first_key: jax.Array) -> jax.Array:
    tile = (WG_QUERIES, shape.tuning.tile_kv)
    row, column = (plgpu.broadcasted_iota(jnp.int32, tile, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
    # Sums that change from turn to turn, so that the compiler does not keep 64 of them in registers.
    query_pos, key_pos = row + rows.first_pos, column + first_key
    return visible(query_pos, key_pos, shape.options.window)


def _add_values(
    refs: Refs, shape: KernelShape, warpgroup: jax.Array, slot: jax.Array, probs: jax.Array, accumulator: jax.Array
) -> jax.Array:
    values = refs.v_smem.at[slot, :, _columns(shape, warpgroup)]
    if not shape.tuning.stage_p_in_smem:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, probs, values))(plgpu.ACC.init(accumulator))

    def multiply(acc_ref: Ref) -> jax.Array:
        plgpu.wgmma(acc_ref, refs.p_smem.at[warpgroup], values)
        return acc_ref[...]

    return accumulator + pl.run_scoped(multiply, plgpu.ACC((WG_QUERIES, shape.value_dim), jnp.float32))


def _columns(shape: KernelShape, warpgroup: jax.Array) -> Any:
    first = warpgroup * shape.value_dim if shape.split.columns > 1 else 0
    return pl.ds(first, shape.value_dim)


def _store(refs: Refs, shape: KernelShape, warpgroup: jax.Array, rows: WarpgroupRows, result: jax.Array) -> None:
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
            first_column = column + warpgroup * shape.value_dim if shape.split.columns > 1 else column
            _store_rows(staged, refs.out.at[:, rows.head, pl.ds(first_column, EDGE_WIDTH)], rows)


def _store_rows(staged: Ref, out: Ref, rows: WarpgroupRows) -> None:
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
