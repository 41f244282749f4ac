"""Products with packed and float8 weights compiled for an H200 at the shapes of real models; needs no GPU."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from octavo.pallas_kernels.aot import CompileReport, KernelResources, aot_missing, compile_for
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.quantized_matmul import float8_matmul, quantized_matmul, xla

if reason := mosaic_missing() or aot_missing():
    pytest.skip(reason, allow_module_level=True)

SHARED_MEMORY, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
"""Of a multiprocessor on Hopper: bytes in all, bytes that the system takes for each thread block, registers."""
WARPGROUPS, THREADS = 2, 128
SHAPES = {
    "gate and up of llama-3-8b, awq": ((28672, 4096), 4, 128, True),
    "q, k and v of llama-3-8b, awq": ((6144, 4096), 4, 128, True),
    "down of llama-3-8b, gptq": ((4096, 14336), 4, 128, False),
    "gate and up of qwen2.5-7b, awq": ((37888, 3584), 4, 128, True),
    "down of qwen2.5-7b, awq": ((3584, 18944), 4, 64, True),
    "gate and up of llama-3-8b, 8 bits": ((28672, 4096), 8, 128, False),
    "down of qwen2.5-7b, 8 bits, a scale for each row": ((3584, 18944), 8, 18944, False),
    "q, k and v of llama-3-8b, awq, groups of 32": ((6144, 4096), 4, 32, True),
}
NUM_TOKENS = dict(zip(SHAPES, (32, 8, 16, 64, 32, 32, 64, 8), strict=True))


def arguments(name: str, num_tokens: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> tuple:
    (out_size, in_size), bits, group_size, has_zero = SHAPES[name]
    groups = (out_size, in_size // group_size)
    return (
        jax.ShapeDtypeStruct((num_tokens, in_size), dtype),
        jax.ShapeDtypeStruct((out_size, in_size * bits // 32), jnp.int32),
        jax.ShapeDtypeStruct(groups, dtype),
        jax.ShapeDtypeStruct(groups, jnp.int8) if has_zero else None,
    )


@cache
def report(
    name: str, num_tokens: int, implementation: str = "mosaic", dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> CompileReport:
    _, bits, group_size, _ = SHAPES[name]
    run = partial(quantized_matmul, bits=bits, group_size=group_size, implementation=implementation)
    return compile_for("h200", run, *arguments(name, num_tokens, dtype))


def check_kernel(kernel: KernelResources) -> None:
    """No registers spilled, tensor cores and TMA used, two thread blocks at once on a multiprocessor."""
    assert kernel.spill_bytes == 0
    assert kernel.uses("wgmma.mma_async")
    assert kernel.uses("cp.async.bulk.tensor")
    assert 2 * (kernel.shared_bytes + RESERVED) <= SHARED_MEMORY
    assert 2 * kernel.registers * WARPGROUPS * THREADS <= REGISTERS


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_fit_the_gpu(name):
    (kernel,) = report(name, NUM_TOKENS[name]).kernels
    assert kernel.name.startswith(f"quantized_matmul_w{SHAPES[name][1]}a16")
    check_kernel(kernel)


def test_float16_fits_too():
    (kernel,) = report("q, k and v of llama-3-8b, awq", 32, dtype=jnp.float16).kernels
    check_kernel(kernel)


def test_weights_are_read_packed():
    """Two launches: the kernel, and the sum of its ranges. Nothing of the size of the weight is written, no copy of
    it is made; XLA alone writes the whole weight out in bfloat16."""
    name = "gate and up of llama-3-8b, awq"
    (out_size, in_size), num_tokens = SHAPES[name][0], 32
    mosaic = report(name, num_tokens)
    assert [i.opcode for i in mosaic.instructions] == ["custom-call", "fusion"]
    assert mosaic.temp_bytes <= 4 * out_size * num_tokens
    plain = report(name, num_tokens, "xla")
    assert plain.temp_bytes >= 2 * out_size * in_size


def test_many_tokens_widen_the_weight_once():
    name = "q, k and v of llama-3-8b, awq"
    many = report(name, 512)
    assert not many.kernels
    assert many.temp_bytes >= 2 * 6144 * 4096


def test_weights_are_widened_in_their_turn(monkeypatch):
    """A few layers of many tokens keep one or two weights in bfloat16 at a time, however many layers there are. Without
    the barrier XLA widens them all first."""

    def weights_at_a_time(size: int) -> float:
        weight = (
            jax.ShapeDtypeStruct((size, size // 8), jnp.int32),
            jax.ShapeDtypeStruct((size, size // 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((size, size // 128), jnp.int8),
        )

        def layers(x, *weights):
            for packed, scale, zero in weights:
                x = quantized_matmul(x, packed, scale, zero, bits=4, group_size=128, implementation="mosaic")
            return x

        tokens = jax.ShapeDtypeStruct((512, size), jnp.bfloat16)
        return compile_for("h200", layers, tokens, *[weight] * 6).temp_bytes / (2 * size * size)

    assert weights_at_a_time(2048) <= 2.5
    monkeypatch.setattr(xla.lax, "optimization_barrier", lambda arrays: arrays)
    assert weights_at_a_time(2176) >= 6


def widened_first(x, x_scale, weight, weight_scale):
    """The same product, written so that XLA widens the weight."""
    wide = [
        (a.astype(jnp.float32) * s[:, None]).astype(jnp.bfloat16) for a, s in ((x, x_scale), (weight, weight_scale))
    ]
    return jnp.dot(wide[0], wide[1].T)


@pytest.mark.parametrize(("multiply", "widens"), [(float8_matmul, False), (widened_first, True)])
def test_float8_stays_float8(multiply, widens):
    """No wider weight exists anywhere in the program. Compiled without a GPU, XLA takes a kernel that it generates; on
    a GPU autotuning may take cuBLASLt's instead."""
    program = compile_for(
        "h200",
        multiply,
        jax.ShapeDtypeStruct((2048, 4096), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((2048,), jnp.float32),
        jax.ShapeDtypeStruct((6144, 4096), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((6144,), jnp.float32),
    )
    assert bool(re.search(r"(bf16|f16|f32)\[6144,4096\]", program.hlo)) == widens
