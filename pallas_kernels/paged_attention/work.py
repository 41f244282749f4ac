"""The work list of a decode step: which thread block attends which keys of which row.

A row is cut into items of about equal length, so that one long row spreads over the whole GPU and short ones do not
wait for it. The number of items is static; how they are shared out follows the lengths.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WorkPlan(NamedTuple):
    """W items, rows in order; padding items, which have no keys, come last."""

    items: jax.Array
    """i32[W, 4]: row, first key, end of keys (exclusive), first key that the query sees (differs from the first key
    only where a window begins inside a block). Padding: all 0."""
    row_items: jax.Array
    """i32[R + 1]: row r's items are row_items[r] .. row_items[r + 1] - 1; none for a row of length 0."""


def num_work_items(num_rows: int, max_keys: int, num_kv_heads: int, target_blocks: int, min_keys: int) -> int:
    """W for a bucket: one item for each row, and enough more for ``target_blocks`` thread blocks in all.

    ``max_keys``: the longest a row can be; no row is cut into items shorter than ``min_keys``.
    """
    extra = -(-target_blocks // num_kv_heads)
    return min(num_rows + extra, num_rows * -(-max_keys // min_keys))


def plan_work(
    seq_lens: jax.Array, *, num_items: int, block_size: int, tile_kv: int, min_keys: int, window: int | None
) -> WorkPlan:
    """Shares out the visible keys of rows of ``seq_lens`` i32[R] tokens among ``num_items`` items.

    An item begins at a block and covers whole tiles of ``tile_kv`` keys, except at the row's end. ``num_items`` as
    ``num_work_items`` gives it, with the same ``min_keys``, a multiple of ``tile_kv``.
    """
    num_rows = seq_lens.shape[0]
    first_seen = jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0)
    first_key = first_seen // block_size * block_size
    num_keys = seq_lens - first_key

    # With items of at least total / (W - R) keys, no more than W - R are full, and each row has at most one other.
    keys_per_item = jnp.int32(min_keys)
    if num_items > num_rows:
        keys_per_item = jnp.maximum(keys_per_item, _ceil_div(jnp.sum(num_keys), num_items - num_rows))
    else:
        keys_per_item = jnp.maximum(keys_per_item, jnp.max(num_keys))
    pieces = _ceil_div(num_keys, _round_up(keys_per_item, tile_kv))
    piece = _round_up(_ceil_div(num_keys, jnp.maximum(pieces, 1)), tile_kv)
    pieces = _ceil_div(num_keys, jnp.maximum(piece, 1))

    # Sums over a triangle instead of a scan: one small fused reduction on a GPU.
    rows, items = jnp.arange(num_rows), jnp.arange(num_items)
    ends = jnp.sum(jnp.where(rows[None, :] <= rows[:, None], pieces[None, :], 0), axis=1)
    row = jnp.sum((ends[None, :] <= items[:, None]).astype(jnp.int32), axis=1)
    used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    first = first_key[row] + (items - (ends - pieces)[row]) * piece[row]
    end = jnp.minimum(first + piece[row], seq_lens[row])
    fields = jnp.stack([row, first, end, jnp.maximum(first_seen[row], first)], axis=1)
    row_items = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return WorkPlan(jnp.where(used[:, None], fields, 0).astype(jnp.int32), row_items.astype(jnp.int32))


def _ceil_div(x: jax.Array, y: jax.Array | int) -> jax.Array:
    return (x + y - 1) // y


def _round_up(x: jax.Array, multiple: int) -> jax.Array:
    return _ceil_div(x, multiple) * multiple
