"""Decode attention written the plain way: gather everything, one dense softmax. For tests only."""

import jax
import jax.numpy as jnp

from ..attention_common import AttentionOptions, softcapped, visible


def paged_attention_reference(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The same arguments and result as ``paged_attention``."""
    return attend_each_query(q, kv, block_tables, seq_lens - 1, sinks, AttentionOptions(scale, window, softcap))


def attend_each_query(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_pos: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Every query with a block table of its own.

    q ``[T, N, H]``; block_tables i32 ``[T, max_blocks]``; query_pos i32 ``[T]``, -1 for a query that sees nothing.
    Returns ``[T, N, H]`` in q's type.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    num_keys = block_tables.shape[1] * block_size
    blocks = kv[block_tables].astype(jnp.float32)  # [T, max_blocks, 2, K, S, H]
    keys_and_values = blocks.transpose(2, 0, 1, 4, 3, 5).reshape(2, num_queries, num_keys, num_kv_heads, head_dim)
    seen = visible(query_pos[:, None], jnp.arange(num_keys)[None, :], options.window)  # [T, num_keys]
    keys_and_values = jnp.where(seen[None, :, :, None, None], keys_and_values, 0.0)
    k, v = jnp.repeat(keys_and_values, num_heads // num_kv_heads, axis=3)  # [T, num_keys, N, H]

    scores = jnp.einsum("tnh,tcnh->tnc", q.astype(jnp.float32), k, precision="highest") * options.scale
    scores = jnp.where(seen[:, None, :], softcapped(scores, options.softcap), -jnp.inf)
    if sinks is not None:
        sink_scores = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (num_queries, num_heads, 1))
        scores = jnp.concatenate([scores, sink_scores], axis=2)
        v = jnp.concatenate([v, jnp.zeros_like(v[:, :1])], axis=1)
    probs = jnp.where(jnp.any(seen, axis=1)[:, None, None], jax.nn.softmax(scores, axis=2), 0.0)
    return jnp.einsum("tnc,tcnh->tnh", probs, v, precision="highest").astype(q.dtype)
