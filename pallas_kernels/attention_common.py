"""What the two attention operations share: options, argument checks, and masking arithmetic."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30
"""A masked score. Finite, so that a row with no key at all stays free of NaN (-inf minus -inf)."""


@dataclass(frozen=True)
class AttentionOptions:
    """The static part of an attention call; hashable, so that equal calls share one trace."""

    scale: float
    """Factor on q · k."""
    window: int | None = None
    """A query at position p sees the keys in (p - window, p]; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: unchanged."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite; got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1; got {self.window}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite; got {self.softcap}")


def check_attention_inputs(
    q: jax.Array, kv: jax.Array, block_tables: jax.Array, seq_lens: jax.Array, sinks: jax.Array | None
) -> None:
    """Raises ValueError unless the shapes and types fit each other.

    q ``[T or R, N, H]``; kv ``[B, 2, K, S, H]``; block_tables i32 ``[R, max_blocks]``; seq_lens i32 ``[R]``;
    sinks ``[N]`` or None.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head_dim]; got shape {q.shape}")
    if kv.ndim != 5 or kv.shape[1] != 2:
        raise ValueError(f"kv must be [num_blocks, 2, kv_heads, block_size, head_dim]; got shape {kv.shape}")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[2]
    if kv.shape[4] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} but kv has {kv.shape[4]}")
    if num_heads % num_kv_heads:
        raise ValueError(f"the {num_heads} query heads are no multiple of the {num_kv_heads} KV heads")
    for name, array in (("q", q), ("kv", kv)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point; got {array.dtype}")
    for name, array in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32; got {array.dtype}")
    if seq_lens.ndim != 1 or block_tables.ndim != 2 or block_tables.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            "block_tables must be [rows, max_blocks] and seq_lens [rows]; "
            f"got shapes {block_tables.shape} and {seq_lens.shape}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], one per query head; got shape {sinks.shape}")


def softcapped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def visible(query_pos: jax.Array, key_pos: jax.Array, window: int | None) -> jax.Array:
    """True where a query at ``query_pos`` sees the key at ``key_pos``; the two broadcast."""
    seen = key_pos <= query_pos
    return seen if window is None else seen & (key_pos > query_pos - window)
