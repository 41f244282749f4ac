"""The pool is donated, written and read in place: never copied, never read past the tokens present."""

import re

import jax
import jax.numpy as jnp
import pytest

from octavo.models.kv_cache import write_kv
from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention

NUM_LAYERS, NUM_ROWS, NUM_TOKENS = 2, 4, 64
POOL_SHAPE = (512, 2, 3, 16, 64)
DTYPES = {"float32": "f32", "uint8": "u8"}
"""Of pools (uint8 is float8) -> as XLA calls them."""
MAX_BLOCKS = 2048  # 32k tokens a row; gathering them all would take 100 times the memory allowed below


def pool_shape(dtype: str) -> tuple[int, ...]:
    """As many bytes of each type."""
    return (POOL_SHAPE[0] * 4 // jnp.dtype(dtype).itemsize, *POOL_SHAPE[1:])


def compile_step(op: str, dtype: str = "float32", read_pool_of_before: bool = False) -> jax.stages.Compiled:
    """Two layers, each writing its donated pool and then attending over it; float8 with scales."""
    num_queries = NUM_TOKENS if op == "mixed" else NUM_ROWS

    def step(pools, q, slots, tables, query_start_loc, lens):
        new_pools = []
        scales = None if dtype == "float32" else jnp.asarray([0.5, 2.0], jnp.float32)
        for pool in pools:
            k = q[:, : POOL_SHAPE[2]]
            new_pools.append(write_kv(pool, k, k, slots, scales))
            kv = pool if read_pool_of_before else new_pools[-1]
            if op == "mixed":
                more = {"scale": 0.125, "kv_scales": scales}
                q = q + ragged_paged_attention(q, kv, tables, query_start_loc, lens, **more)
            else:
                q = q + paged_attention(q, kv, tables, lens, scale=0.125, kv_scales=scales)
        return new_pools, q

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pools = [jax.ShapeDtypeStruct(pool_shape(dtype), dtype)] * NUM_LAYERS
    q = jax.ShapeDtypeStruct((num_queries, 9, 64), jnp.float32)
    args = (pools, q, ints(num_queries), ints(NUM_ROWS, MAX_BLOCKS), ints(NUM_ROWS + 1), ints(NUM_ROWS))
    return jax.jit(step, donate_argnums=0).lower(*args).compile()


POOL_BYTES = 4 * POOL_SHAPE[0] * 2 * POOL_SHAPE[2] * POOL_SHAPE[3] * POOL_SHAPE[4]


def pool_copies(compiled: jax.stages.Compiled, dtype: str = "float32") -> list[str]:
    """Copies in the program whose result is as large as one layer's pool or one side of it."""
    num_blocks = pool_shape(dtype)[0]
    shape = "|".join(str(size) for size in (num_blocks * 2 * POOL_SHAPE[2], num_blocks * 2, num_blocks))
    pattern = rf"^.*{DTYPES[dtype]}\[(?:{shape}),[^=]*? (?:copy|copy-start)\(.*$"
    return re.findall(pattern, compiled.as_text(), re.MULTILINE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["decode", "mixed"])
def test_pool_is_aliased_whole_and_never_copied(op, dtype):
    compiled = compile_step(op, dtype)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == NUM_LAYERS * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 4
    assert pool_copies(compiled, dtype) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_reader_of_the_pool_is_caught(dtype):
    compiled = compile_step("decode", dtype, read_pool_of_before=True)
    assert compiled.memory_analysis().temp_size_in_bytes >= POOL_BYTES or pool_copies(compiled, dtype)


def test_a_pool_that_xla_converts_is_caught():
    """Why a float8 pool is kept as bytes: XLA on a CPU has no gather or scatter of float8."""
    assert compile_step("decode", "float8_e4m3fn").memory_analysis().temp_size_in_bytes >= POOL_BYTES
