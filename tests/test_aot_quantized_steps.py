"""Whole decode steps of quantised models, compiled for H200s without one: 4 bits on two GPUs, float8 on one."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.args import EngineArgs
from octavo.engine.plan import DraftEngine
from octavo.models.layers.linear import matmul
from octavo.models.quantization.weights import IntWeight
from octavo.pallas_kernels.aot import CompileReport, aot_missing, compile_for, find_target
from octavo.pallas_kernels.compat import mosaic_missing

LAYERS, NUM_BLOCKS, ROWS = 3, 8000, 32
AWQ, FP8 = ("qwen2.5-72b-awq", None, 2), ("qwen2.5-7b", "fp8", 1)
"""Preset, quantisation on top of it, GPUs."""
WEIGHTS = {
    AWQ: ((5120, 8192), (8192, 4096), (29696, 8192), (8192, 14848)),
    FP8: ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""[out, in] on one GPU of qkv, o, gate and up, down."""

missing = aot_missing() or mosaic_missing()
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing)), pytest.mark.timeout(600)]
STEPS = [pytest.param(AWQ, id="awq-2-gpus"), pytest.param(FP8, id="fp8")]


@cache
def compiled(step: tuple[str, str | None, int]) -> tuple[DraftEngine, CompileReport]:
    """Each once per session, in some 20 seconds of CPU."""
    args = EngineArgs(
        model=step[0],
        quantization=step[1],
        tensor_parallel_size=step[2],
        max_model_len=8192,
        max_num_seqs=ROWS,
        max_num_batched_tokens=2048,
        attention_backend="mosaic",
        hf_overrides={"num_hidden_layers": LAYERS},
    )
    engine = DraftEngine(args, find_target("h200"))
    return engine, engine.compile(max(engine.buckets.decode), NUM_BLOCKS)


def arrays_of_size(hlo: str, shapes: tuple[tuple[int, int], ...]) -> set[str]:
    """Types of arrays with such a shape, or with the groups of its columns apart."""
    sizes = "|".join(f"{rows},{columns}|{rows},{columns // 128},128" for rows, columns in shapes)
    return set(re.findall(rf"\b([a-z]+\d+\w*)\[(?:{sizes})\]", hlo))


@pytest.mark.parametrize(("step", "stored"), [(AWQ, {"s4"}), (FP8, {"f8e4m3fn"})], ids=["awq-2-gpus", "fp8"])
def test_no_widened_weight_is_anywhere(step, stored):
    """Packed ones are seen as 4-bit integers, which costs nothing: no instruction writes that many bytes."""
    _, report = compiled(step)
    assert arrays_of_size(report.hlo, WEIGHTS[step]) == stored
    if step is AWQ:
        for rows, columns in WEIGHTS[AWQ]:
            assert f"s32[{rows},{columns // 8}]" in report.hlo
    # Nothing that a layer writes, but for the pool in its place, is half as large as the smallest of them in bfloat16.
    written = [i.num_bytes for i in report.instructions if "_run_layer" in i.op_name and "scatter" not in i.op_name]
    assert max(written) < min(rows * columns for rows, columns in WEIGHTS[step])
    assert report.temp_bytes < 120e6


def test_a_widened_weight_would_be_seen():
    out_size, in_size = WEIGHTS[AWQ][1]
    weight = IntWeight(
        jax.ShapeDtypeStruct((out_size, in_size // 8), jnp.int32),
        jax.ShapeDtypeStruct((out_size, in_size // 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((out_size, in_size // 128), jnp.int8),
    )
    report = compile_for("h200", matmul, jax.ShapeDtypeStruct((ROWS, in_size), jnp.bfloat16), weight)
    assert "bf16" in arrays_of_size(report.hlo, WEIGHTS[AWQ])


def test_four_products_a_layer_are_our_kernel():
    engine, report = compiled(AWQ)
    calls = [i for i in report.instructions if i.opcode == "custom-call" and "quantized_matmul_w4a16" in i.op_name]
    assert len(calls) == 4 * LAYERS
    assert engine.attention.implementation == "mosaic"


@pytest.mark.parametrize("step", STEPS)
def test_no_kernel_spills(step):
    """Those of 4 bits are compiled for this step alone, so all four shapes are told of."""
    _, report = compiled(step)
    if step is AWQ:
        assert sum("quantized_matmul_w4a16" in kernel.name for kernel in report.kernels) == 4
    assert [kernel.name for kernel in report.kernels if kernel.spill_bytes] == []


@pytest.mark.parametrize(("step", "most"), [(AWQ, 19), (FP8, 20)], ids=["awq-2-gpus", "fp8"])
def test_launches_of_a_layer(step, most):
    """Beside the 13 of a plain layer: on two GPUs two all-reduces and the sums of the kernels' ranges of columns; with
    float8 what rounds activations."""
    _, report = compiled(step)
    assert report.launches_in("_run_layer") / LAYERS <= most


def test_two_gpus_reduce_twice_a_layer_and_gather_no_weight():
    _, report = compiled(AWQ)
    in_layers = [i for i in report.instructions if "_run_layer" in i.op_name]
    assert sum(i.opcode.removesuffix("-start") == "all-reduce" for i in in_layers) == 2 * LAYERS
    for opcode in ("all-gather", "all-to-all", "collective-permute", "copy", "transpose"):
        assert max(report.sizes_of(opcode), default=0) < 10e6, opcode


def test_one_gpu_runs_one_command_buffer():
    _, report = compiled(FP8)
    assert (report.command_buffers, report.launches_outside_command_buffers) == (1, [])


@pytest.mark.parametrize("step", STEPS)
def test_the_pool_is_updated_in_place(step):
    engine, report = compiled(step)
    pool = engine.pool_bytes(NUM_BLOCKS)
    assert pool <= report.alias_bytes < pool * 1.1
