"""A paged pool for attention tests, in which whatever a kernel must not use is poison."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

NULL_BLOCK = 0
"""What the table holds where no row sees a key; NaN throughout."""


@dataclass(frozen=True)
class PagedBatch:
    """One decode call's arrays."""

    q: jax.Array
    kv: jax.Array
    tables: jax.Array
    lens: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.q, self.kv, self.tables, self.lens


def make_paged_batch(
    lens: tuple[int, ...],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: jnp.dtype = jnp.bfloat16,
    window: int | None = None,
    kv_dtype: jnp.dtype | None = None,
) -> PagedBatch:
    """Rows of ``lens`` tokens with blocks in random order.

    The first two rows of more than a block share their first, and the longest row has a block twice. The pool is NaN
    wherever no row sees a key.
    """
    rng = np.random.default_rng(0)
    counts = [-(-n // block_size) for n in lens]
    max_blocks = max(counts) + 2
    ids = list(rng.permutation(np.arange(1, sum(counts) + 6)))
    tables = np.full((len(lens), max_blocks), NULL_BLOCK, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [ids.pop() for _ in range(count)]
    full = [row for row, n in enumerate(lens) if n > block_size]
    if len(full) > 1 and window is None:
        tables[full[1], 0] = tables[full[0], 0]
    longest = int(np.argmax(lens))
    if counts[longest] > 3:
        tables[longest, counts[longest] - 3] = tables[longest, counts[longest] - 2]

    num_blocks = sum(counts) + 6
    seen = np.zeros((num_blocks, block_size), bool)
    for row, n in enumerate(lens):
        first = 0 if window is None else max(0, n - window)
        tables[row, : first // block_size] = NULL_BLOCK
        for key in range(first, n):
            seen[tables[row, key // block_size], key % block_size] = True
    kv = rng.standard_normal((num_blocks, 2, num_kv_heads, block_size, head_dim))
    kv = np.where(seen[:, None, None, :, None], kv, np.nan)
    q = rng.standard_normal((len(lens), num_heads, head_dim))
    pool = jnp.asarray(kv, jnp.float32).astype(kv_dtype or dtype)
    return PagedBatch(jnp.asarray(q, dtype), pool, jnp.asarray(tables), jnp.asarray(lens, jnp.int32))


def worst_error(got: jax.Array, want: jax.Array) -> float:
    """The largest of the vectors' errors (along the last axis) relative to their own length; NaN counts as infinite.

    A wanted vector of zeros must be got exactly.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    error, length = (np.linalg.norm(x, axis=-1) for x in (got - want, want))
    relative = np.divide(error, length, out=np.where(error > 0, np.inf, 0.0), where=length > 0)
    return float(np.where(np.isnan(error), np.inf, relative).max())
