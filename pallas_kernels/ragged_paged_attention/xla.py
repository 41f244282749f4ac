"""Mixed attention in plain JAX.

Rows with one query token take the decode loop of ``paged_attention``. The other rows are cut into tiles of query
tokens; one loop walks over the tiles, an inner one over the chunks of keys between the tile's first visible key and
its diagonal. Both trip counts follow the tokens present. A history whose blocks all these rows share is attended first,
by all their tokens together.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..attention_common import (
    MASK_VALUE,
    AttentionOptions,
    SoftmaxState,
    gather_chunk,
    matmul_precision,
    softcapped,
    visible,
)
from ..paged_attention.xla import RowPlan, attend_planned_rows, plan_rows
from ..shared_prefix import attend_shared_prefix, count_shared_blocks
from .config import CPU_TUNING, GPU_TUNING, TuningConfig


def tuning_for(platform: str) -> TuningConfig:
    """The sizes for a device's platform, as JAX names it."""
    return CPU_TUNING if platform == "cpu" else GPU_TUNING


class _Tile(NamedTuple):
    """Up to tile_q consecutive query tokens of one row; in a plan, arrays over all tiles."""

    row: jax.Array  # i32
    first_token: jax.Array  # i32, index into q
    num_tokens: jax.Array  # i32, 1 … tile_q
    first_pos: jax.Array  # i32, position of the first token in its sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPlan:
    """What no layer changes, worked out once a step."""

    singles: RowPlan  # the rows with one query token, which are decode's
    single_tokens: jax.Array  # i32[R], their tokens; T for the other rows
    block_tables: jax.Array  # i32[R, max_blocks]
    tiles: _Tile  # i32[W] each
    num_tiles: jax.Array  # i32
    shared_table: jax.Array  # i32[max_blocks], of a row with tiles
    num_shared_chunks: jax.Array  # i32, chunks of shared_blocks that the histories of all rows with tiles share
    tile_q: int = field(metadata={"static": True})
    shared_blocks: int = field(metadata={"static": True})  # 0: sharing is not looked for
    tuning: TuningConfig = field(metadata={"static": True})


def ragged_paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    plan: TokenPlan | None = None,
) -> jax.Array:
    """Shapes as in ``ragged_paged_attention``. Without a plan, which tuning applies is known when the program is
    lowered."""
    if plan is not None:
        return attend_planned_tokens(q, kv, plan, sinks, options)
    return jax.lax.platform_dependent(
        q,
        kv,
        block_tables,
        query_start_loc,
        seq_lens,
        sinks,
        cpu=partial(attend_tokens, options=options, tuning=CPU_TUNING),
        default=partial(attend_tokens, options=options, tuning=GPU_TUNING),
    )


def plan_tokens(
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
    tuning: TuningConfig,
) -> TokenPlan:
    """Shapes as in ``ragged_paged_attention``, with T = ``num_tokens``; ``window`` and ``tuning`` of the attention."""
    query_lens = jnp.diff(query_start_loc)
    is_single = query_lens == 1
    first_token = query_start_loc[:-1]
    tile_q = min(tuning.tile_q, num_tokens)
    tiles_per_row = jnp.where(is_single, 0, (query_lens + tile_q - 1) // tile_q)
    tiles_up_to_row = jnp.cumsum(tiles_per_row)
    num_rows = seq_lens.shape[0]
    index = jnp.arange(num_tokens // tile_q + min(num_rows, num_tokens // 2) + 1)
    row = jnp.searchsorted(tiles_up_to_row, index, side="right", method="compare_all")
    row = jnp.minimum(row, num_rows - 1)
    start = (index - (tiles_up_to_row[row] - tiles_per_row[row])) * tile_q
    shared_blocks, num_shared_chunks = 0, jnp.int32(0)
    has_tiles = query_lens > 1
    if tuning.decode.shared_chunk_tokens > 0 and window is None and num_rows > 1:
        shared_blocks = max(1, tuning.decode.shared_chunk_tokens // block_size)
        history = seq_lens - query_lens
        num_shared_chunks = count_shared_blocks(block_tables, has_tiles, history, block_size) // shared_blocks
    single_lens = jnp.where(is_single, seq_lens, 0)
    return TokenPlan(
        singles=plan_rows(block_tables, single_lens, block_size=block_size, window=window, tuning=tuning.decode),
        single_tokens=jnp.where(is_single, first_token, num_tokens),
        block_tables=block_tables,
        tiles=_Tile(
            row=row,
            first_token=first_token[row] + start,
            num_tokens=jnp.minimum(query_lens[row] - start, tile_q),
            first_pos=seq_lens[row] - query_lens[row] + start,
        ),
        num_tiles=tiles_up_to_row[-1],
        shared_table=block_tables[jnp.argmax(has_tiles)],
        num_shared_chunks=num_shared_chunks,
        tile_q=tile_q,
        shared_blocks=shared_blocks,
        tuning=tuning,
    )


def attend_tokens(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tuning: TuningConfig,
) -> jax.Array:
    """Plans and attends."""
    plan = plan_tokens(
        block_tables,
        query_start_loc,
        seq_lens,
        num_tokens=q.shape[0],
        block_size=kv.shape[3],
        window=options.window,
        tuning=tuning,
    )
    return attend_planned_tokens(q, kv, plan, sinks, options)


def attend_planned_tokens(
    q: jax.Array, kv: jax.Array, plan: TokenPlan, sinks: jax.Array | None, options: AttentionOptions
) -> jax.Array:
    num_tokens, tile_q = q.shape[0], plan.tile_q
    single_q = q[jnp.minimum(plan.single_tokens, num_tokens - 1)]
    single_out = attend_planned_rows(single_q, kv, plan.singles, sinks, options)
    out = jnp.zeros_like(q).at[plan.single_tokens].set(single_out, mode="drop")

    # A tile is read and written as tile_q tokens from its first one: the last may reach past T.
    padded_q, padded_out = (jnp.pad(x, ((0, tile_q), (0, 0), (0, 0))) for x in (q, out))
    num_heads, head_dim = q.shape[1:]
    by_head = (padded_q.astype(jnp.float32) * options.scale).reshape(num_tokens + tile_q, kv.shape[2], -1, head_dim)
    by_head = by_head.transpose(1, 2, 0, 3)
    begun = _attend_shared_history(by_head, kv, plan, sinks, options)

    def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        tile = _Tile(*(field[index] for field in plan.tiles))
        old = jax.lax.dynamic_slice_in_dim(out, tile.first_token, tile_q)

        def of_tile(x: jax.Array) -> jax.Array:  # [K, G, T, …] -> [K, G * tile_q, …]
            x = jax.lax.dynamic_slice_in_dim(x, tile.first_token, tile_q, axis=2)
            return x.reshape(x.shape[0], -1, *x.shape[3:])

        new = _attend_tile(of_tile(by_head), kv, jax.tree.map(of_tile, begun), tile, plan, options)
        new = new.reshape(num_heads, tile_q, head_dim).transpose(1, 0, 2)
        is_query = jnp.arange(tile_q) < tile.num_tokens
        new = jnp.where(is_query[:, None, None], new.astype(out.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, tile.first_token, axis=0)

    return jax.lax.fori_loop(0, plan.num_tiles, attend_tile, padded_out)[:num_tokens]


def _attend_shared_history(
    q: jax.Array, kv: jax.Array, plan: TokenPlan, sinks: jax.Array | None, options: AttentionOptions
) -> SoftmaxState:
    """The softmax of every token over what all rows with tiles share of their histories.

    q f32 ``[K, G, T, H]``, scaled; the state is over ``[K, G, T]``.
    """
    num_kv_heads, group, num_tokens, head_dim = q.shape

    def for_each_token(x: jax.Array) -> jax.Array:  # [K, G, …] -> [K, G * T, …]
        x = jnp.broadcast_to(x[:, :, None], (num_kv_heads, group, num_tokens, *x.shape[2:]))
        return x.reshape(num_kv_heads, -1, *x.shape[3:])

    state = jax.tree.map(for_each_token, SoftmaxState.start((num_kv_heads, group, head_dim), sinks))
    if plan.shared_blocks:
        flat_q, table = q.reshape(num_kv_heads, -1, head_dim), plan.shared_table
        state = attend_shared_prefix(flat_q, kv, table, plan.num_shared_chunks, plan.shared_blocks, state, options)
    return jax.tree.map(lambda x: x.reshape(num_kv_heads, group, num_tokens, *x.shape[2:]), state)


def _attend_tile(
    q: jax.Array, kv: jax.Array, state: SoftmaxState, tile: _Tile, plan: TokenPlan, options: AttentionOptions
) -> jax.Array:
    """The tile's attention ``[K, G * tile_q, H]``; what lies past ``tile.num_tokens`` means nothing.

    q f32 ``[K, G * tile_q, H]``, scaled; the state over ``[K, G * tile_q]`` covers what the plan says is shared.
    """
    tile_q, tuning = plan.tile_q, plan.tuning
    num_kv_heads, block_size = kv.shape[2:4]
    group = q.shape[1] // tile_q
    block_table = plan.block_tables[tile.row]
    chunk_blocks = min(max(1, tuning.chunk_tokens // block_size), block_table.shape[0])
    chunk_tokens = chunk_blocks * block_size
    block_table = jnp.pad(block_table, (0, chunk_blocks))
    precision = matmul_precision(kv.dtype)

    query_pos = tile.first_pos + jnp.arange(tile_q)
    num_keys = tile.first_pos + tile.num_tokens

    def turn(chunk: jax.Array, state: SoftmaxState) -> SoftmaxState:
        ids = jax.lax.dynamic_slice_in_dim(block_table, first_block + chunk * chunk_blocks, chunk_blocks)
        key_pos = first_block * block_size + chunk * chunk_tokens + jnp.arange(chunk_tokens)
        written = (key_pos < num_keys)[None]
        k, v = gather_chunk(kv, ids[None], written, tuning.decode.branch_on_partial_chunks)  # [1, K, C, H]
        scores = jnp.einsum("kqh,kch->kqc", q, k[0], precision=precision)
        seen = written & visible(query_pos[:, None], key_pos[None, :], options.window)  # [tile_q, C]
        scores = softcapped(scores, options.softcap).reshape(num_kv_heads, group, tile_q, chunk_tokens)
        scores = jnp.where(seen, scores, MASK_VALUE).reshape(num_kv_heads, group * tile_q, chunk_tokens)
        return state.update(scores, v[0], precision)

    first_key = 0 if options.window is None else jnp.maximum(tile.first_pos - options.window + 1, 0)
    num_shared = plan.num_shared_chunks * plan.shared_blocks
    first_block = num_shared + first_key // block_size  # with a window nothing is shared
    num_chunks = (num_keys - first_block * block_size + chunk_tokens - 1) // chunk_tokens
    return jax.lax.fori_loop(0, num_chunks, turn, state).result()
