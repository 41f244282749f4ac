"""Both attention operations, every implementation, against the dense reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.attention_common import AttentionOptions
from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference


def pool(rng, lens, *, kv_heads, block_size, head_dim, max_blocks):
    n = max_blocks * len(lens) + 1
    kv = np.full((n, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, n))
    tables = np.zeros((len(lens), max_blocks), np.int32)
    for r, length in enumerate(lens):
        nb = -(-length // block_size)
        tables[r, :nb], ids = ids[:nb], ids[nb:]
        for i in range(length):
            kv[tables[r, i // block_size], :, :, i % block_size] = rng.standard_normal((2, kv_heads, head_dim))
    return kv, tables


@pytest.mark.parametrize("extra", [{}, {"window": 7}, {"softcap": 2.0}])
def test_quick(extra):
    rng = np.random.default_rng(0)
    lens = [0, 1, 3, 4, 5, 70]
    kv, tables = pool(rng, lens, kv_heads=2, block_size=4, head_dim=16, max_blocks=20)
    q = rng.standard_normal((6, 6, 16)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    args = (jnp.asarray(q), jnp.asarray(kv), jnp.asarray(tables), jnp.asarray(lens, jnp.int32))
    for s in (None, jnp.asarray(sinks)):
        got = paged_attention(*args, scale=0.3, sinks=s, **extra)
        want = paged_attention_reference(*args, s, AttentionOptions(scale=0.3, **extra))
        np.testing.assert_allclose(got, want, atol=1e-5)
        ql = [0, 1, 2, 4, 3, 20]
        loc = jnp.asarray(np.concatenate([[0], np.cumsum(ql)]), jnp.int32)
        q2 = jnp.asarray(rng.standard_normal((35, 6, 16)), jnp.float32)
        got = ragged_paged_attention(q2, *args[1:3], loc, args[3], scale=0.3, sinks=s, **extra)
        want = ragged_paged_attention_reference(q2, *args[1:3], loc, args[3], s, AttentionOptions(scale=0.3, **extra))
        np.testing.assert_allclose(got, want, atol=1e-5)
