"""Decode attention in plain JAX: an online softmax over chunks of blocks."""

import jax
import jax.numpy as jnp

from ..attention_common import MASK_VALUE, AttentionOptions, softcapped, visible

BLOCKS_PER_CHUNK = 8


def paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Shapes as in ``paged_attention``. The loop ends with the longest row."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    group = num_heads // num_kv_heads
    chunk_blocks = min(BLOCKS_PER_CHUNK, block_tables.shape[1])
    chunk_tokens = chunk_blocks * block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % chunk_blocks)))
    grouped_q = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, group, head_dim)

    def attend_chunk(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        running_max, denominator, accumulator = carry
        ids = jax.lax.dynamic_slice_in_dim(tables, chunk * chunk_blocks, chunk_blocks, axis=1)
        key_pos = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        seen = visible(seq_lens[:, None] - 1, key_pos[None, :], options.window)[:, None, None, :]
        blocks = kv.at[ids].get(mode="promise_in_bounds").astype(jnp.float32)  # [R, blocks, 2, K, S, H]
        blocks = blocks.transpose(2, 0, 3, 1, 4, 5).reshape(2, num_rows, num_kv_heads, chunk_tokens, head_dim)
        k, v = jnp.where(seen.transpose(0, 1, 3, 2)[None], blocks, 0.0)
        scores = jnp.einsum("rkgh,rkch->rkgc", grouped_q, k) * options.scale
        scores = jnp.where(seen, softcapped(scores, options.softcap), MASK_VALUE)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
        probs = jnp.where(seen, jnp.exp(scores - new_max[..., None]), 0.0)
        decay = jnp.exp(running_max - new_max)
        values = jnp.einsum("rkgc,rkch->rkgh", probs, v)
        return new_max, denominator * decay + jnp.sum(probs, axis=-1), accumulator * decay[..., None] + values

    shape = (num_rows, num_kv_heads, group)
    sink = jnp.full((num_heads,), MASK_VALUE) if sinks is None else sinks.astype(jnp.float32)
    start = (
        jnp.broadcast_to(sink.reshape(1, num_kv_heads, group), shape),
        jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    num_chunks = (jnp.max(seq_lens) + chunk_tokens - 1) // chunk_tokens
    _, denominator, accumulator = jax.lax.fori_loop(0, num_chunks, attend_chunk, start)
    out = accumulator / jnp.where(denominator == 0.0, 1.0, denominator)[..., None]
    return out.reshape(num_rows, num_heads, head_dim).astype(q.dtype)
