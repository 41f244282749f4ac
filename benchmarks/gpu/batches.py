"""Paged batches of random numbers, made on the device."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Heads:
    """What a call to attention is shaped by besides its rows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def bytes(self, rows: list[tuple[int, int]], itemsize: int = 2) -> int:
        """Keys and values read once, queries read and results written."""
        keys = sum(seq_len for _, seq_len in rows)
        queries = sum(query_len for query_len, _ in rows)
        return (2 * keys * self.num_kv_heads + 2 * queries * self.num_heads) * self.head_dim * itemsize

    def flops(self, rows: list[tuple[int, int]]) -> int:
        """Of the visible products, causal."""
        seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in rows)
        return 4 * seen * self.num_heads * self.head_dim


@dataclass
class Batch:
    """The arrays of a call. All pools have the same table."""

    q: jax.Array
    """``[T, N, H]``"""
    pools: list[jax.Array]
    """``[B, 2, K, S, H]`` each."""
    tables: jax.Array
    starts: np.ndarray
    """i32 ``[R + 1]``, query_start_loc."""
    lens: np.ndarray
    """i32 ``[R]``, seq_lens."""


def make_batch(
    rows: list[tuple[int, int]],
    heads: Heads,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    num_pools: int = 1,
    poison: bool = False,
    seed: int = 0,
) -> Batch:
    """``rows`` of (query_len, seq_len), their blocks scattered over the pool at random; block 0 belongs to nobody.

    ``poison``: what no row's length covers is NaN.
    """
    rng = np.random.default_rng(seed)
    size = heads.block_size
    counts = [-(-seq_len // size) for _, seq_len in rows]
    num_blocks = sum(counts) + 1
    ids = iter(rng.permutation(num_blocks - 1) + 1)
    tables = np.zeros((len(rows), max(1, *counts)), np.int32)
    written = np.zeros((num_blocks, size), bool)
    for row, (count, (_, seq_len)) in enumerate(zip(counts, rows, strict=True)):
        tables[row, :count] = [next(ids) for _ in range(count)]
        keys = np.arange(seq_len)
        written[tables[row, keys // size], keys % size] = True
    shape = (num_blocks, 2, heads.num_kv_heads, size, heads.head_dim)
    mask = jnp.asarray(written) if poison else None
    pools = [_random_pool(shape, kv_dtype or dtype, seed + index, mask) for index in range(num_pools)]
    starts = np.cumsum([0] + [query_len for query_len, _ in rows]).astype(np.int32)
    q = _normal((int(starts[-1]), heads.num_heads, heads.head_dim), dtype, seed + 7919)
    lens = np.array([seq_len for _, seq_len in rows], np.int32)
    return Batch(q, pools, jnp.asarray(tables), starts, lens)


@partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, jnp.bfloat16).astype(dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _random_pool(shape: tuple[int, ...], dtype: str, seed: int, written: jax.Array | None) -> jax.Array:
    pool = _normal(shape, dtype, seed)
    if written is None:
        return pool
    return jnp.where(written[:, None, None, :, None], pool, jnp.asarray(jnp.nan, dtype))
