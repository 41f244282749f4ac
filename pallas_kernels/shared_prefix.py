"""Attention to a prefix that many rows share, such as a system prompt: its blocks are read once for all of them.

The online softmax of every query begins with the shared blocks, in products over all queries together; each row goes
on with the blocks of its own. (The idea is known as cascade attention.)
"""

import jax
import jax.numpy as jnp

from .attention_common import AttentionOptions, SoftmaxState, gather_chunk, matmul_precision, softcapped


def count_shared_blocks(tables: jax.Array, active: jax.Array, num_keys: jax.Array, block_size: int) -> jax.Array:
    """How many leading blocks all active rows have in common, each full of keys that all of their queries see.

    tables i32 ``[R, blocks]``; active bool ``[R]``; num_keys i32 ``[R]``, the keys that all queries of a row see. 0 if
    fewer than two rows are active: a lone row shares with nobody, and its own loop is the cheaper one.
    """
    first = jnp.argmax(active)
    same = jnp.all((tables == tables[first]) | ~active[:, None], axis=0)
    full_in_all = jnp.min(jnp.where(active, num_keys, jnp.iinfo(jnp.int32).max)) // block_size
    num_same = jnp.minimum(jnp.sum(jnp.cumprod(same.astype(jnp.int32))), full_in_all)
    return jnp.where(jnp.sum(active) > 1, num_same, 0)


def attend_shared_prefix(
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    num_chunks: jax.Array,
    chunk_blocks: int,
    state: SoftmaxState,
    options: AttentionOptions,
) -> SoftmaxState:
    """Adds ``num_chunks`` chunks of ``chunk_blocks`` blocks to the softmax of every query.

    q f32 ``[K, M, H]``, scaled, M queries of each KV head; kv ``[B, 2, K, S, H]``; table i32 ``[blocks]``; state over
    ``[K, M]``. All keys of the chunks must be written, and seen by all queries.
    """
    precision = matmul_precision(kv.dtype)
    table = jnp.pad(table, (0, chunk_blocks))
    written = jnp.ones((1, chunk_blocks * kv.shape[3]), jnp.bool_)

    def turn(chunk: jax.Array, state: SoftmaxState) -> SoftmaxState:
        ids = jax.lax.dynamic_slice(table, (chunk * chunk_blocks,), (chunk_blocks,))
        k, v = gather_chunk(kv, ids[None], written, False)  # [1, K, C, H]
        scores = jnp.einsum("kmh,kch->kmc", q, k[0], precision=precision)
        return state.update(softcapped(scores, options.softcap), v[0], precision)

    return jax.lax.fori_loop(0, num_chunks, turn, state)
