"""Mixed attention in plain JAX."""

import jax
import jax.numpy as jnp

from ..attention_common import AttentionOptions
from ..paged_attention.xla import paged_attention_xla


def ragged_paged_attention_xla(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Shapes as in ``ragged_paged_attention``. Each token is a decode row of its own."""
    token = jnp.arange(q.shape[0])
    row = jnp.searchsorted(query_start_loc[1:], token, side="right")
    real = row < seq_lens.shape[0]
    row = jnp.minimum(row, seq_lens.shape[0] - 1)
    lens = jnp.where(real, seq_lens[row] - (query_start_loc[row + 1] - token) + 1, 0)
    return paged_attention_xla(q, kv, block_tables[row], lens, sinks, options)
