"""Decode attention in plain JAX: an online softmax over chunks of blocks.

Rows are sorted by the number of keys they see and cut into groups. One loop walks over (group, chunk): a group takes
as many turns as its longest row has chunks, so the cost follows the tokens present, and padding rows cost nothing.
A prefix whose blocks all rows share is attended first, by all rows together, and read once.
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
)
from ..shared_prefix import attend_shared_prefix, count_shared_blocks
from .config import CPU_TUNING, GPU_TUNING, TuningConfig


class _Groups(NamedTuple):
    """The rows in groups of W, longest first; shapes ``[groups, W, …]``."""

    q: jax.Array  # f32[groups, W, K, G, H], scaled
    tables: jax.Array  # i32[groups, W, blocks], from the first block that the row sees
    num_keys: jax.Array  # i32[groups, W], keys from that block's start to the query


def paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Shapes as in ``paged_attention``. Which tuning applies is known when the program is lowered."""
    return jax.lax.platform_dependent(
        q,
        kv,
        block_tables,
        seq_lens,
        sinks,
        cpu=partial(attend_rows, options=options, tuning=CPU_TUNING),
        default=partial(attend_rows, options=options, tuning=GPU_TUNING),
    )


def attend_rows(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tuning: TuningConfig,
) -> jax.Array:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    rows_per_group = min(tuning.rows_per_group, num_rows)
    chunk_blocks = min(max(1, tuning.chunk_tokens // block_size), block_tables.shape[1])

    tables, num_keys = _skip_blocks_before_window(block_tables, seq_lens, block_size, options.window)
    order = jnp.argsort(-num_keys)
    padding = -num_rows % rows_per_group

    def grouped(x: jax.Array, *tail: int) -> jax.Array:
        x = jnp.pad(x[order], ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, rows_per_group, *tail)

    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % chunk_blocks)))
    scaled_q = q.astype(jnp.float32) * options.scale
    groups = _Groups(
        q=grouped(scaled_q, num_kv_heads, num_heads // num_kv_heads, head_dim),
        tables=grouped(tables, tables.shape[1]),
        num_keys=grouped(num_keys),
    )
    state = _loop(groups, kv, sinks, chunk_blocks, options, tuning)
    out = state.result().reshape(-1, num_heads, head_dim)[:num_rows].astype(q.dtype)
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)


def _skip_blocks_before_window(
    block_tables: jax.Array, seq_lens: jax.Array, block_size: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Tables that begin with the first visible block, and the number of keys from there on."""
    if window is None:
        return block_tables, seq_lens
    first_block = jnp.maximum(seq_lens - window, 0) // block_size
    max_blocks = block_tables.shape[1]
    columns = jnp.minimum(first_block[:, None] + jnp.arange(max_blocks), max_blocks - 1)
    return jnp.take_along_axis(block_tables, columns, axis=1), seq_lens - first_block * block_size


def _loop(
    groups: _Groups,
    kv: jax.Array,
    sinks: jax.Array | None,
    chunk_blocks: int,
    options: AttentionOptions,
    tuning: TuningConfig,
) -> SoftmaxState:
    """All turns of all groups; returns the state ``[groups, W, K, G]``."""
    rows_per_group = groups.num_keys.shape[1]
    chunk_tokens = chunk_blocks * kv.shape[3]
    precision = matmul_precision(kv.dtype)
    num_chunks = (jnp.max(groups.num_keys, axis=1) + chunk_tokens - 1) // chunk_tokens
    start = SoftmaxState.start(groups.q.shape, sinks)
    shares = tuning.shared_chunk_tokens > 0 and options.window is None and groups.num_keys.size > 1
    first_chunk = jnp.int32(0)
    if shares:
        shared_blocks = max(1, tuning.shared_chunk_tokens // chunk_tokens) * chunk_blocks
        start, num_shared = _attend_shared_prefix(groups, kv, start, shared_blocks, options)
        first_chunk = num_shared * (shared_blocks // chunk_blocks)
        num_chunks = jnp.maximum(num_chunks, first_chunk)

    def turn(_: jax.Array, carry: tuple[jax.Array, jax.Array, SoftmaxState]) -> tuple:
        group, chunk, states = carry
        q, num_keys, state = jax.tree.map(lambda x: x[group], (groups.q, groups.num_keys, states))
        ids = jax.lax.dynamic_slice(groups.tables, (group, 0, chunk * chunk_blocks), (1, rows_per_group, chunk_blocks))[
            0
        ]
        key = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        written = key < num_keys[:, None]  # [W, C]
        k, v = gather_chunk(kv, ids, written, tuning.branch_on_partial_chunks)  # [W, K, C, H]
        scores = jnp.einsum("wkgh,wkch->wkgc", q, k, precision=precision)
        seen = written if options.window is None else written & (key >= num_keys[:, None] - options.window)
        scores = jnp.where(seen[:, None, None], softcapped(scores, options.softcap), MASK_VALUE)
        state = state.update(scores, v, precision)
        states = jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, group, 0), states, state)
        is_last = chunk + 1 >= num_chunks[group]
        return jnp.where(is_last, group + 1, group), jnp.where(is_last, first_chunk, chunk + 1), states

    # Groups without keys of their own come last and take no turn.
    num_turns = jnp.sum(num_chunks - first_chunk)
    _, _, states = jax.lax.fori_loop(0, num_turns, turn, (jnp.int32(0), first_chunk, start))
    return states


def _attend_shared_prefix(
    groups: _Groups, kv: jax.Array, start: SoftmaxState, chunk_blocks: int, options: AttentionOptions
) -> tuple[SoftmaxState, jax.Array]:
    """Attends all rows to the leading blocks that are the same in every row's table.

    Returns the state and how many chunks of ``chunk_blocks`` blocks it covers (0 where nothing is shared).
    """
    num_groups, width, num_kv_heads, group_size, _ = groups.q.shape
    tables = groups.tables.reshape(num_groups * width, -1)
    num_keys = groups.num_keys.reshape(-1)
    active = num_keys > 0
    num_chunks = count_shared_blocks(tables, active, num_keys, kv.shape[3]) // chunk_blocks

    def by_head(x: jax.Array) -> jax.Array:  # [groups, W, K, G, …] -> [K, groups * W * G, …]
        return jnp.moveaxis(x, 2, 0).reshape(num_kv_heads, -1, *x.shape[4:])

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_kv_heads, num_groups, width, group_size, *x.shape[2:]), 0, 2)

    # The rows are sorted: the first one is active if any is.
    state = attend_shared_prefix(
        by_head(groups.q), kv, tables[0], num_chunks, chunk_blocks, jax.tree.map(by_head, start), options
    )
    of_group = active.reshape(num_groups, width)
    kept = [
        jnp.where(of_group[(...,) + (None,) * (old.ndim - 2)], by_row(new), old)
        for new, old in zip(state, start, strict=True)
    ]
    return SoftmaxState(*kept), num_chunks
