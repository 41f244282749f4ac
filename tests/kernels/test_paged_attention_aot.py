"""The decode kernel compiled for an H200 at the shapes of real models; runs no kernel and needs no GPU."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from gpu_models import GPU_MODELS

from octavo.pallas_kernels.aot import CompileReport, aot_missing, compile_for
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.paged_attention import paged_attention

if reason := mosaic_missing() or aot_missing():
    pytest.skip(reason, allow_module_level=True)

SHARED_MEMORY, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
"""Of a multiprocessor on Hopper: bytes in all, bytes that the system takes for each thread block, registers."""
ROWS, MAX_BLOCKS, NUM_BLOCKS = 64, 512, 20_000


def attend(num_layers: int, arrays: dict, **options) -> jax.Array:
    """``num_layers`` layers that read the same pool."""
    q = arrays["q"]
    for _ in range(num_layers):
        q = paged_attention(
            q,
            *(arrays[name] for name in ("kv", "tables", "lens")),
            sinks=arrays.get("sinks"),
            **options,
            kv_scales=arrays.get("scales"),
            implementation="mosaic",
        )
    return q


@cache
def report(model: str, num_layers: int = 1) -> CompileReport:
    shape = {"block_size": 16, "dtype": jnp.bfloat16, "has_sinks": False, **GPU_MODELS[model]}
    num_heads, head_dim, dtype = shape["num_heads"], shape["head_dim"], shape["dtype"]
    pool = (NUM_BLOCKS, 2, shape["num_kv_heads"], shape["block_size"], head_dim)
    arrays = {
        "q": jax.ShapeDtypeStruct((ROWS, num_heads, head_dim), dtype),
        "kv": jax.ShapeDtypeStruct(pool, shape.get("kv_dtype", dtype)),
        "tables": jax.ShapeDtypeStruct((ROWS, MAX_BLOCKS), jnp.int32),
        "lens": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    if shape["has_sinks"]:
        arrays["sinks"] = jax.ShapeDtypeStruct((num_heads,), jnp.float32)
    if "kv_dtype" in shape:
        arrays["scales"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    options = {"scale": head_dim**-0.5, "window": shape.get("window"), "softcap": shape.get("softcap")}
    return compile_for("h200", partial(attend, num_layers, **options), arrays)


@pytest.mark.parametrize("model", GPU_MODELS)
def test_kernels_fit_the_gpu(model):
    """No registers spilled, tensor cores and TMA used, shared memory within the limit, and for heads of up to 128
    columns two thread blocks at once on a multiprocessor."""
    # The combine is listed for the first model of a shape only: JAX compiles a kernel once.
    kernels = {kernel.name.rstrip("_0123456789"): kernel for kernel in report(model).kernels}
    attention = kernels["paged_attention"]
    assert attention.uses("wgmma.mma_async")
    assert attention.uses("cp.async.bulk.tensor")
    assert all(kernel.spill_bytes == 0 for kernel in kernels.values())
    at_once = 2 if GPU_MODELS[model]["head_dim"] <= 128 else 1
    assert at_once * (attention.shared_bytes + RESERVED) <= SHARED_MEMORY
    assert at_once * attention.registers * 128 <= REGISTERS


def test_layers_share_one_work_list():
    """A second layer costs its two kernels and the padding of its queries; the work list is computed once."""
    one, two = report("qwen2.5-7b"), report("qwen2.5-7b", num_layers=2)
    assert len(two.instructions) - len(one.instructions) == 3
    assert len(one.instructions) <= 9
