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
MAX_BLOCKS = 2048  # 32k tokens a row; gathering them all would take 100 times the memory allowed below


def compile_step(op: str, read_pool_of_before: bool = False) -> jax.stages.Compiled:
    """Two layers, each writing its donated pool and then attending over it."""
    num_queries = NUM_TOKENS if op == "mixed" else NUM_ROWS

    def step(pools, q, slots, tables, query_start_loc, lens):
        new_pools = []
        for pool in pools:
            k = q[:, : POOL_SHAPE[2]]
            new_pools.append(write_kv(pool, k, k, slots))
            kv = pool if read_pool_of_before else new_pools[-1]
            if op == "mixed":
                q = q + ragged_paged_attention(q, kv, tables, query_start_loc, lens, scale=0.125)
            else:
                q = q + paged_attention(q, kv, tables, lens, scale=0.125)
        return new_pools, q

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pools = [jax.ShapeDtypeStruct(POOL_SHAPE, jnp.float32)] * NUM_LAYERS
    q = jax.ShapeDtypeStruct((num_queries, 9, 64), jnp.float32)
    args = (pools, q, ints(num_queries), ints(NUM_ROWS, MAX_BLOCKS), ints(NUM_ROWS + 1), ints(NUM_ROWS))
    return jax.jit(step, donate_argnums=0).lower(*args).compile()


def pool_copies(compiled: jax.stages.Compiled) -> list[str]:
    """Copies in the program whose result is as large as one layer's pool or one side of it."""
    sizes = [POOL_SHAPE[0] * 2 * POOL_SHAPE[2], POOL_SHAPE[0] * 2, POOL_SHAPE[0]]
    shape = "|".join(str(size) for size in sizes)
    return re.findall(rf"^.*f32\[(?:{shape}),[^=]*? (?:copy|copy-start)\(.*$", compiled.as_text(), re.MULTILINE)


@pytest.mark.parametrize("op", ["decode", "mixed"])
def test_pool_is_aliased_whole_and_never_copied(op):
    compiled = compile_step(op)
    pool_bytes = 4 * POOL_SHAPE[0] * 2 * POOL_SHAPE[2] * POOL_SHAPE[3] * POOL_SHAPE[4]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == NUM_LAYERS * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    assert pool_copies(compiled) == []


def test_a_second_reader_of_the_pool_is_caught():
    compiled = compile_step("decode", read_pool_of_before=True)
    pool_bytes = 4 * POOL_SHAPE[0] * 2 * POOL_SHAPE[2] * POOL_SHAPE[3] * POOL_SHAPE[4]
    assert compiled.memory_analysis().temp_size_in_bytes >= pool_bytes or pool_copies(compiled)
