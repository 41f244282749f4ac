"""Mixed attention in plain JAX.

Rows with one query token take the decode loop of ``paged_attention``. The other rows are cut into tiles of query
tokens; one loop walks over the tiles, an inner one over the chunks of keys between the tile's first visible key and
its diagonal. Both trip counts follow the tokens present. A history whose blocks all these rows share is attended first,
by all their tokens together.
"""

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
from ..paged_attention.xla import attend_rows
from ..shared_prefix import attend_shared_prefix, count_shared_blocks
from .config import CPU_TUNING, GPU_TUNING, TuningConfig


class _Tile(NamedTuple):
    """Up to tile_q consecutive query tokens of one row."""

    row: jax.Array  # i32
    first_token: jax.Array  # i32, index into q
    num_tokens: jax.Array  # i32, 1 … tile_q
    first_pos: jax.Array  # i32, position of the first token in its sequence


def ragged_paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Shapes as in ``ragged_paged_attention``. Which tuning applies is known when the program is lowered."""
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
    num_tokens = q.shape[0]
    query_lens = jnp.diff(query_start_loc)
    is_single = query_lens == 1
    first_token = query_start_loc[:-1]
    single_q = q[jnp.minimum(first_token, num_tokens - 1)]
    single_lens = jnp.where(is_single, seq_lens, 0)
    single_out = attend_rows(single_q, kv, block_tables, single_lens, sinks, options, tuning.decode)
    target = jnp.where(is_single, first_token, num_tokens)
    out = jnp.zeros_like(q).at[target].set(single_out, mode="drop")

    tile_q = min(tuning.tile_q, num_tokens)
    tiles_per_row = jnp.where(is_single, 0, (query_lens + tile_q - 1) // tile_q)
    tiles_up_to_row = jnp.cumsum(tiles_per_row)
    # A tile is read and written as tile_q tokens from its first one: the last may reach past T.
    padded_q, padded_out = (jnp.pad(x, ((0, tile_q), (0, 0), (0, 0))) for x in (q, out))
    history = seq_lens - query_lens
    begun, num_shared = _attend_shared_history(
        padded_q, kv, block_tables, query_lens > 1, history, sinks, options, tuning
    )

    def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tiles_up_to_row, index, side="right", method="compare_all")
        start = (index - (tiles_up_to_row[row] - tiles_per_row[row])) * tile_q
        tile = _Tile(
            row=row,
            first_token=query_start_loc[row] + start,
            num_tokens=jnp.minimum(query_lens[row] - start, tile_q),
            first_pos=seq_lens[row] - query_lens[row] + start,
        )
        old = jax.lax.dynamic_slice_in_dim(out, tile.first_token, tile_q)
        state = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, tile.first_token, tile_q), begun)
        new = _attend_tile(padded_q, kv, block_tables[row], state, num_shared, tile, options, tuning)
        is_query = jnp.arange(tile_q) < tile.num_tokens
        new = jnp.where(is_query[:, None, None], new.astype(out.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, tile.first_token, axis=0)

    return jax.lax.fori_loop(0, tiles_up_to_row[-1], attend_tile, padded_out)[:num_tokens]


def _attend_shared_history(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    active: jax.Array,
    history: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tuning: TuningConfig,
) -> tuple[SoftmaxState, jax.Array]:
    """The softmax of every token over what all active rows share of their histories, and the number of blocks of it.

    q ``[T, N, H]``; history i32 ``[R]``, keys before a row's first query. The state is over ``[T, K, G]``.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    shape = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    start = SoftmaxState.start(shape, sinks)
    if tuning.decode.shared_chunk_tokens == 0 or options.window is not None or block_tables.shape[0] == 1:
        return start, jnp.int32(0)
    chunk_blocks = max(1, tuning.decode.shared_chunk_tokens // block_size)
    num_chunks = count_shared_blocks(block_tables, active, history, block_size) // chunk_blocks

    def by_head(x: jax.Array) -> jax.Array:  # [T, K, G, …] -> [K, T * G, …]
        return jnp.moveaxis(x, 1, 0).reshape(num_kv_heads, -1, *x.shape[3:])

    def by_token(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_kv_heads, num_tokens, -1, *x.shape[2:]), 0, 1)

    scaled = (q.astype(jnp.float32) * options.scale).reshape(shape)
    table = block_tables[jnp.argmax(active)]
    state = attend_shared_prefix(
        by_head(scaled), kv, table, num_chunks, chunk_blocks, jax.tree.map(by_head, start), options
    )
    return jax.tree.map(by_token, state), num_chunks * chunk_blocks


def _attend_tile(
    q: jax.Array,
    kv: jax.Array,
    block_table: jax.Array,
    begun: SoftmaxState,
    num_shared: jax.Array,
    tile: _Tile,
    options: AttentionOptions,
    tuning: TuningConfig,
) -> jax.Array:
    """Returns ``[tile_q, N, H]``; what lies past ``tile.num_tokens`` means nothing.

    begun: the softmax over ``[tile_q, K, G]`` so far, which covers the row's first ``num_shared`` blocks.
    """
    tile_q = begun.maximum.shape[0]
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.shape[2:4]
    group = num_heads // num_kv_heads
    chunk_blocks = min(max(1, tuning.chunk_tokens // block_size), block_table.shape[0])
    chunk_tokens = chunk_blocks * block_size
    block_table = jnp.pad(block_table, (0, chunk_blocks))
    precision = matmul_precision(kv.dtype)

    tile_tokens = jax.lax.dynamic_slice_in_dim(q, tile.first_token, tile_q).astype(jnp.float32) * options.scale
    grouped = tile_tokens.reshape(tile_q, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.reshape(num_kv_heads, group * tile_q, head_dim)
    query_pos = tile.first_pos + jnp.arange(tile_q)
    num_keys = tile.first_pos + tile.num_tokens

    def turn(chunk: jax.Array, state: SoftmaxState) -> SoftmaxState:
        ids = jax.lax.dynamic_slice_in_dim(block_table, first_block + chunk * chunk_blocks, chunk_blocks)
        key_pos = first_block * block_size + chunk * chunk_tokens + jnp.arange(chunk_tokens)
        written = (key_pos < num_keys)[None]
        k, v = gather_chunk(kv, ids[None], written, tuning.decode.branch_on_partial_chunks)  # [1, K, C, H]
        scores = jnp.einsum("kqh,kch->kqc", grouped, k[0], precision=precision)
        seen = written & visible(query_pos[:, None], key_pos[None, :], options.window)  # [tile_q, C]
        scores = softcapped(scores, options.softcap).reshape(num_kv_heads, group, tile_q, chunk_tokens)
        scores = jnp.where(seen, scores, MASK_VALUE).reshape(num_kv_heads, group * tile_q, chunk_tokens)
        return state.update(scores, v[0], precision)

    first_key = 0 if options.window is None else jnp.maximum(tile.first_pos - options.window + 1, 0)
    first_block = num_shared + first_key // block_size  # with a window nothing is shared
    state = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(num_kv_heads, group * tile_q, *x.shape[3:]), begun)
    num_chunks = (num_keys - first_block * block_size + chunk_tokens - 1) // chunk_tokens
    state = jax.lax.fori_loop(0, num_chunks, turn, state)
    out = state.result().reshape(num_kv_heads, group, tile_q, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(tile_q, num_heads, head_dim)
