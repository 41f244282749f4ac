"""Decode attention in plain JAX: an online softmax over chunks of blocks.

Rows are sorted by the number of keys they see and cut into groups. One loop walks over (group, chunk): a group takes
as many turns as its longest row has chunks, so the cost follows the tokens present, and padding rows cost nothing.
A prefix whose blocks all rows share is attended first, by all rows together, and read once.
"""

from dataclasses import dataclass, field
from functools import partial

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


def tuning_for(platform: str) -> TuningConfig:
    """The sizes for a device's platform, as JAX names it."""
    return CPU_TUNING if platform == "cpu" else GPU_TUNING


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowPlan:
    """The rows in groups of W, longest first: what no layer changes, worked out once a step."""

    order: jax.Array  # i32[R], the rows in the order of the groups
    tables: jax.Array  # i32[groups, W, blocks], from the first block that the row sees
    num_keys: jax.Array  # i32[groups, W], keys from that block's start to the query
    num_chunks: jax.Array  # i32[groups], where each group's loop ends
    num_shared_chunks: jax.Array  # i32, chunks of shared_blocks that all rows share
    chunk_blocks: int = field(metadata={"static": True})
    shared_blocks: int = field(metadata={"static": True})  # a multiple of chunk_blocks; 0: sharing is not looked for
    tuning: TuningConfig = field(metadata={"static": True})

    @property
    def first_chunk(self) -> jax.Array:
        """Where the loops begin: after what all rows share."""
        return self.num_shared_chunks * (self.shared_blocks // self.chunk_blocks)

    def grouped(self, x: jax.Array) -> jax.Array:
        """``[R, …]`` → ``[groups, W, …]``; padding rows are zeros."""
        num_groups, width = self.num_keys.shape
        padding = num_groups * width - x.shape[0]
        x = jnp.pad(x[self.order], ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(num_groups, width, *x.shape[1:])


def paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    plan: RowPlan | None = None,
) -> jax.Array:
    """Shapes as in ``paged_attention``. Without a plan, which tuning applies is known when the program is lowered."""
    if plan is not None:
        return attend_planned_rows(q, kv, plan, sinks, options)
    return jax.lax.platform_dependent(
        q,
        kv,
        block_tables,
        seq_lens,
        sinks,
        cpu=partial(attend_rows, options=options, tuning=CPU_TUNING),
        default=partial(attend_rows, options=options, tuning=GPU_TUNING),
    )


def plan_rows(
    block_tables: jax.Array, seq_lens: jax.Array, *, block_size: int, window: int | None, tuning: TuningConfig
) -> RowPlan:
    """Shapes as in ``paged_attention``; ``window`` and ``tuning`` must be those of the attention."""
    num_rows = seq_lens.shape[0]
    width = min(tuning.rows_per_group, num_rows)
    chunk_blocks = min(max(1, tuning.chunk_tokens // block_size), block_tables.shape[1])
    chunk_tokens = chunk_blocks * block_size
    tables, num_keys = _skip_blocks_before_window(block_tables, seq_lens, block_size, window)
    order = jnp.argsort(-num_keys)
    padding = -num_rows % width
    tables = jnp.pad(tables[order], ((0, padding), (0, -tables.shape[1] % chunk_blocks)))
    num_keys = jnp.pad(num_keys[order], (0, padding))

    shared_blocks, num_shared_chunks = 0, jnp.int32(0)
    if tuning.shared_chunk_tokens > 0 and window is None and num_keys.size > 1:
        shared_blocks = max(1, tuning.shared_chunk_tokens // chunk_tokens) * chunk_blocks
        num_shared_chunks = count_shared_blocks(tables, num_keys > 0, num_keys, block_size) // shared_blocks
    num_keys = num_keys.reshape(-1, width)
    first_chunk = num_shared_chunks * (shared_blocks // chunk_blocks)
    return RowPlan(
        order=order,
        tables=tables.reshape(-1, width, tables.shape[1]),
        num_keys=num_keys,
        num_chunks=jnp.maximum((jnp.max(num_keys, axis=1) + chunk_tokens - 1) // chunk_tokens, first_chunk),
        num_shared_chunks=num_shared_chunks,
        chunk_blocks=chunk_blocks,
        shared_blocks=shared_blocks,
        tuning=tuning,
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
    """Plans and attends."""
    plan = plan_rows(block_tables, seq_lens, block_size=kv.shape[3], window=options.window, tuning=tuning)
    return attend_planned_rows(q, kv, plan, sinks, options)


def attend_planned_rows(
    q: jax.Array, kv: jax.Array, plan: RowPlan, sinks: jax.Array | None, options: AttentionOptions
) -> jax.Array:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    scaled_q = q.astype(jnp.float32) * options.scale
    grouped_q = plan.grouped(scaled_q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim))
    state = _loop(grouped_q, plan, kv, sinks, options)
    out = state.result().reshape(-1, num_heads, head_dim)[:num_rows].astype(q.dtype)
    return jnp.zeros_like(out).at[plan.order].set(out, unique_indices=True)


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
    grouped_q: jax.Array, plan: RowPlan, kv: jax.Array, sinks: jax.Array | None, options: AttentionOptions
) -> SoftmaxState:
    """All turns of all groups over q f32 ``[groups, W, K, G, H]``; returns the state ``[groups, W, K, G]``."""
    rows_per_group = plan.num_keys.shape[1]
    chunk_blocks, branch_on_partial_chunks = plan.chunk_blocks, plan.tuning.branch_on_partial_chunks
    chunk_tokens = chunk_blocks * kv.shape[3]
    precision = matmul_precision(kv.dtype)
    start = SoftmaxState.start(grouped_q.shape, sinks)
    if plan.shared_blocks:
        start = _attend_shared_prefix(grouped_q, plan, kv, start, options)
    first_chunk = plan.first_chunk

    def turn(_: jax.Array, carry: tuple[jax.Array, jax.Array, SoftmaxState]) -> tuple:
        group, chunk, states = carry
        q, num_keys, state = jax.tree.map(lambda x: x[group], (grouped_q, plan.num_keys, states))
        first = (group, 0, chunk * chunk_blocks)
        ids = jax.lax.dynamic_slice(plan.tables, first, (1, rows_per_group, chunk_blocks))[0]
        key = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        written = key < num_keys[:, None]  # [W, C]
        k, v = gather_chunk(kv, ids, written, branch_on_partial_chunks)  # [W, K, C, H]
        scores = jnp.einsum("wkgh,wkch->wkgc", q, k, precision=precision)
        seen = written if options.window is None else written & (key >= num_keys[:, None] - options.window)
        scores = jnp.where(seen[:, None, None], softcapped(scores, options.softcap), MASK_VALUE)
        state = state.update(scores, v, precision)
        states = jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, group, 0), states, state)
        is_last = chunk + 1 >= plan.num_chunks[group]
        return jnp.where(is_last, group + 1, group), jnp.where(is_last, first_chunk, chunk + 1), states

    # Groups without keys of their own come last and take no turn.
    num_turns = jnp.sum(plan.num_chunks - first_chunk)
    _, _, states = jax.lax.fori_loop(0, num_turns, turn, (jnp.int32(0), first_chunk, start))
    return states


def _attend_shared_prefix(
    grouped_q: jax.Array, plan: RowPlan, kv: jax.Array, start: SoftmaxState, options: AttentionOptions
) -> SoftmaxState:
    """Attends all rows to the leading blocks that are the same in every row's table."""
    num_groups, width, num_kv_heads, group_size, _ = grouped_q.shape

    def by_head(x: jax.Array) -> jax.Array:  # [groups, W, K, G, …] -> [K, groups * W * G, …]
        return jnp.moveaxis(x, 2, 0).reshape(num_kv_heads, -1, *x.shape[4:])

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_kv_heads, num_groups, width, group_size, *x.shape[2:]), 0, 2)

    # The rows are sorted: the first one is active if any is.
    table, by_heads = plan.tables[0, 0], jax.tree.map(by_head, start)
    state = attend_shared_prefix(
        by_head(grouped_q), kv, table, plan.num_shared_chunks, plan.shared_blocks, by_heads, options
    )
    active = plan.num_keys > 0
    kept = [
        jnp.where(active[(...,) + (None,) * (old.ndim - 2)], by_row(new), old)
        for new, old in zip(state, start, strict=True)
    ]
    return SoftmaxState(*kept)
