"""A pool of float8 in every implementation of mixed attention, against the reference over the same numbers widened."""

import math
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import make_paged_batch, worst_error

from octavo.models.kv_cache import write_kv
from octavo.pallas_kernels.aot import aot_missing, compile_for
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import gpu_interpreter, load_mosaic
from octavo.pallas_kernels.float8 import as_bits, as_numbers, number_dtype, storage_dtype
from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference

# Scores of slots that nothing wrote are NaN on their way to the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

SCALES = (0.4, 3.0)
TOLERANCE = {"xla": 1e-5, "mosaic": 2e-3}
"""xla computes in float32, as the reference does. Mosaic rounds queries times their scale, probabilities and results
to float16, 5e-4 each at most."""
QUERY_LENS, LENS = (0, 1, 5, 66, 2), (9, 70, 5, 150, 130)
WIDEN = "octavo.pallas_kernels.ragged_paged_attention.widen"
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing())))


def mixed_error(implementation: str, kv_scales=SCALES, scale: float = 0.3, **options) -> float:
    """The worst error of rows with none, one and several queries, with history; NaN where no row wrote."""
    dtype = jnp.float32 if implementation == "xla" else jnp.float16
    batch = make_paged_batch(
        LENS, num_heads=4, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, kv_dtype=jnp.float8_e4m3fn
    )
    starts = jnp.asarray(np.cumsum([0, *QUERY_LENS]), jnp.int32)
    q = jax.random.normal(jax.random.key(1), (80, 4, 64)).astype(dtype)  # six tokens of padding
    wide = batch.kv.astype(jnp.float32) * jnp.asarray(SCALES).reshape(1, 2, 1, 1, 1)
    rest = (batch.tables, starts, batch.lens)
    want = ragged_paged_attention_reference(q.astype(jnp.float32), wide, *rest, scale=scale, **options)
    got = ragged_paged_attention(
        q,
        as_bits(batch.kv),
        *rest,
        scale=scale,
        kv_scales=None if kv_scales is None else jnp.asarray(kv_scales, jnp.float32),
        implementation=implementation,
        interpret=type(gpu_interpreter())(detect_races=True) if implementation == "mosaic" else None,
        **options,
    )
    assert got.dtype == dtype
    return worst_error(got, want)


@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 2.0}], ids=["plain", "window, softcap"])
@pytest.mark.parametrize("implementation", ["xla", MOSAIC])
def test_mixed_attention_agrees_with_the_reference(implementation, options):
    if options and implementation == "mosaic":
        options = {**options, "sinks": jnp.linspace(-1.0, 2.0, 4)}
    assert mixed_error(implementation, **options) <= TOLERANCE[implementation]


@pytest.mark.parametrize("kv_scales", [None, (SCALES[0], 1.0), (1.0, SCALES[1]), SCALES[::-1]])
@pytest.mark.parametrize("implementation", ["xla", MOSAIC])
def test_a_missing_or_swapped_scale_is_caught(implementation, kv_scales):
    assert mixed_error(implementation, kv_scales) > 1e-2


@pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
@pytest.mark.parametrize("broken", ["_clear_unwritten", "_widen_tile"])
def test_what_the_fetching_warpgroup_leaves_out_is_caught(broken, monkeypatch):
    """A scale of its own for each, so that a trace from before is not taken."""
    where = load_mosaic("ragged_paged_attention") if broken == "_clear_unwritten" else import_module(WIDEN)
    monkeypatch.setattr(where, broken, lambda *args: None)
    assert mixed_error("mosaic", scale=0.31 if broken == "_clear_unwritten" else 0.32) > 1e-2


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shared_prefix_is_read_with_its_scales(mixed):
    """Two rows that share 160 tokens, more than a chunk of what is looked for."""
    lens, block_size = (170, 180), 8
    batch = make_paged_batch(
        lens,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=block_size,
        dtype=jnp.float32,
        kv_dtype=jnp.float8_e4m3fn,
    )
    tables = batch.tables.at[1, : 160 // block_size].set(batch.tables[0, : 160 // block_size])
    kv = jnp.where(jnp.isnan(batch.kv.astype(jnp.float32)), 0.0, batch.kv.astype(jnp.float32))
    pool, wide = kv.astype(jnp.float8_e4m3fn), kv * jnp.asarray(SCALES).reshape(1, 2, 1, 1, 1)
    if mixed:
        q, starts = jnp.tile(batch.q, (3, 1, 1)), jnp.asarray([0, 2, 6], jnp.int32)
        args = (tables, starts, batch.lens)
        operation, reference = ragged_paged_attention, ragged_paged_attention_reference
    else:
        q, args = batch.q, (tables, batch.lens)
        operation, reference = paged_attention, paged_attention_reference
    want = reference(q, wide, *args, scale=0.3)
    run = partial(operation, q, as_bits(pool), *args, scale=0.3)
    assert worst_error(run(kv_scales=jnp.asarray(SCALES)), want) <= 1e-5
    assert worst_error(run(kv_scales=jnp.asarray(SCALES[::-1])), want) > 1e-2


@pytest.mark.skipif((aot_missing() or mosaic_missing()) is not None, reason=str(aot_missing() or mosaic_missing()))
def test_on_a_gpu_bytes_become_float8_without_a_copy():
    """Two layers compiled for an H200, which write their donated pools of bytes and read them as float8."""
    num_layers, num_tokens, pool_shape = 2, 64, (20_000, 2, 8, 16, 128)

    def step(pools, q, slots, tables, starts, lens, scales):
        new = []
        for pool in pools:
            new.append(write_kv(pool, q[:, :8], q[:, 8:16], slots, scales))
            more = {"scale": 0.1, "kv_scales": scales, "implementation": "mosaic"}
            q = ragged_paged_attention(q, new[-1], tables, starts, lens, **more)
        return new, q

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pools = [jax.ShapeDtypeStruct(pool_shape, jnp.uint8)] * num_layers
    q, scales = jax.ShapeDtypeStruct((num_tokens, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)
    report = compile_for("h200", step, pools, q, ints(64), ints(64, 512), ints(65), ints(64), scales, donate_argnums=0)
    assert report.alias_bytes == num_layers * math.prod(pool_shape)
    assert report.temp_bytes < 32 * 2**20
    assert all(kernel.spill_bytes == 0 for kernel in report.kernels)


def test_bytes_are_float8_and_back():
    numbers = jnp.asarray([0.0, -448.0, 2.0**-9, jnp.nan], jnp.float8_e4m3fn)
    bits = as_bits(numbers)
    assert bits.dtype == storage_dtype(numbers.dtype) == jnp.uint8
    assert number_dtype(bits.dtype) == numbers.dtype
    np.testing.assert_array_equal(as_numbers(bits).astype(jnp.float32), numbers.astype(jnp.float32))
    plain = jnp.ones(2, jnp.bfloat16)
    assert as_bits(plain) is plain
    assert as_numbers(plain) is plain


def test_bytes_are_no_pool_of_other_numbers():
    batch = make_paged_batch((3,), num_heads=2, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(ValueError, match="kv must be floating point; got int8"):
        paged_attention(batch.q, batch.kv.astype(jnp.int8), batch.tables, batch.lens, scale=1.0)
    with pytest.raises(ValueError, match="q must be floating point; got uint8"):
        paged_attention(batch.q.astype(jnp.uint8), batch.kv, batch.tables, batch.lens, scale=1.0)
