"""Mixed prefill and decode attention written the plain way. For tests only."""

import jax
import jax.numpy as jnp

from ..attention_common import AttentionOptions
from ..paged_attention.reference import attend_each_query


def ragged_paged_attention_reference(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The same arguments and result as ``ragged_paged_attention``."""
    token = jnp.arange(q.shape[0])
    row = jnp.searchsorted(query_start_loc[1:], token, side="right")  # R for padding tokens
    real = row < seq_lens.shape[0]
    row = jnp.minimum(row, seq_lens.shape[0] - 1)
    tokens_from_the_end = query_start_loc[row + 1] - token
    query_pos = jnp.where(real, seq_lens[row] - tokens_from_the_end, -1)
    return attend_each_query(q, kv, block_tables[row], query_pos, sinks, AttentionOptions(scale, window, softcap))
