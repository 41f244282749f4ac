"""A float8 pool in the xla implementation: scales of keys and values."""

import jax.numpy as jnp
import pytest
from paged_pool import make_paged_batch, worst_error

from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference

BATCH = make_paged_batch(
    (0, 1, 40), num_heads=4, num_kv_heads=2, head_dim=32, block_size=8, dtype=jnp.float32, kv_dtype=jnp.float8_e4m3fn
)
K_SCALE, V_SCALE = 0.4, 3.0


def error(**scales) -> float:
    kv = BATCH.kv.astype(jnp.float32) * jnp.asarray([K_SCALE, V_SCALE]).reshape(1, 2, 1, 1, 1)
    want = paged_attention_reference(BATCH.q, kv, BATCH.tables, BATCH.lens, scale=0.3)
    return worst_error(paged_attention(*BATCH.arrays, scale=0.3, **scales), want)


def test_scales_apply():
    assert error(kv_scales=jnp.asarray([K_SCALE, V_SCALE])) <= 1e-5


@pytest.mark.parametrize("scales", [None, (K_SCALE, 1.0), (1.0, V_SCALE), (V_SCALE, K_SCALE)])
def test_a_missing_or_wrong_scale_is_caught(scales):
    assert error(kv_scales=None if scales is None else jnp.asarray(scales)) > 1e-2


@pytest.mark.parametrize("scales", [jnp.ones(3), jnp.ones((2, 1)), jnp.ones(2, jnp.bfloat16)])
def test_scales_of_another_form_are_named(scales):
    with pytest.raises(ValueError, match=r"kv_scales must be float32 \[2\]; got"):
        error(kv_scales=scales)
