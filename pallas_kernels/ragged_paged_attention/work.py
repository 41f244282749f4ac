"""Which query tiles the Mosaic kernel of mixed attention works on: planned in-graph, once for all layers of a step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE_FIELDS = 5
"""Columns of ``TilePlan.tiles``."""
ROW, FIRST_TOKEN, NUM_TOKENS, NUM_KEYS, SEQ_LEN = range(TILE_FIELDS)


class TilePlan(NamedTuple):
    """Query tiles, those with the most KV tiles first, and how many of them are real."""

    tiles: jax.Array
    """i32 ``[W, 5]``: the row, its first query token (an index into q), the number of query tokens, the number of
    keys up to and with the last query (0: nothing to attend to, the tile gives zeros), the row's length."""
    num_tiles: jax.Array
    """i32 ``[1]``; tiles from there on are never looked at."""


ALIGNMENT = 8
"""A warpgroup's queries start at a multiple of this token: a TMA fills swizzled shared memory in groups of 8 rows."""


def max_tiles(num_tokens: int, num_rows: int, tile_q: int) -> int:
    """The most tiles of ``num_tokens`` tokens in ``num_rows`` rows, each with at least two, and a padding tail."""
    pieces = min(num_rows, num_tokens // 2) + 1
    return (num_tokens + pieces * (tile_q + ALIGNMENT - 2)) // tile_q


def plan_tiles(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    tile_q: int,
    tile_kv: int,
    window: int | None = None,
) -> TilePlan:
    """Cuts the rows with two or more query tokens, and the padding tokens at the end, into tiles of ``tile_q`` tokens.

    query_start_loc i32 ``[R+1]``; seq_lens i32 ``[R]``; ``num_tokens`` is T, ``tile_kv`` the keys per turn. Rows with
    one query token are decode's. Tiles end at tokens that are multiples of ``ALIGNMENT``, or with their row. The order
    is by descending cost, so that programs that take turns end together.
    """
    num_rows = seq_lens.shape[0]
    size = max_tiles(num_tokens, num_rows, tile_q)
    # The padding tokens are one more row, of length 0.
    starts = jnp.append(query_start_loc, num_tokens)
    lens = jnp.append(seq_lens, 0)
    query_lens = jnp.diff(starts)
    is_single = (query_lens == 1) & (jnp.arange(num_rows + 1) < num_rows)
    skipped = starts[:-1] % ALIGNMENT
    tiles_per_row = jnp.where(is_single | (query_lens == 0), 0, (skipped + query_lens + tile_q - 1) // tile_q)
    tiles_up_to_row = jnp.cumsum(tiles_per_row)

    index = jnp.arange(size)
    row = jnp.searchsorted(tiles_up_to_row, index, side="right", method="compare_all")
    row = jnp.minimum(row, num_rows)
    end = (index - (tiles_up_to_row[row] - tiles_per_row[row]) + 1) * tile_q - skipped[row]  # in the row
    start = jnp.maximum(end - tile_q, 0)
    count = jnp.minimum(end, query_lens[row]) - start
    is_padding = row == num_rows
    num_keys = jnp.where(is_padding, 0, lens[row] - query_lens[row] + start + count)
    fields = [jnp.where(is_padding, 0, row), starts[row] + start, count, num_keys, lens[row]]
    tiles = jnp.stack(fields, axis=1).astype(jnp.int32)

    first_key = 0 if window is None else jnp.maximum(num_keys - count - window + 1, 0)
    cost = (num_keys + tile_kv - 1) // tile_kv - first_key // tile_kv
    cost = jnp.where(index < tiles_up_to_row[-1], cost, -1)
    # The rank by counting: a few hundred tiles at most, and a sort would be a launch of its own.
    ahead = (cost[None, :] > cost[:, None]) | ((cost[None, :] == cost[:, None]) & (index[None, :] < index[:, None]))
    rank = jnp.sum(ahead, axis=1)
    return TilePlan(jnp.zeros_like(tiles).at[rank].set(tiles), tiles_up_to_row[-1:].astype(jnp.int32))
