"""The Mosaic kernel for packed weights on a CPU: interpreted with race detection."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from packed_weights import PackedCase, row_errors

from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import load_mosaic
from octavo.pallas_kernels.quantized_matmul import config, quantized_matmul
from octavo.pallas_kernels.quantized_matmul.config import mosaic_tuning

if reason := mosaic_missing():
    pytest.skip(reason, allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

mosaic = load_mosaic("quantized_matmul")
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
"""Memory that nothing wrote is NaN in the interpreter, outputs included."""
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
"""Codes are exact, scales are applied in float32: what is left is the rounding of the result."""

CASES = {
    "one token, group 128": PackedCase(4, 128, 1, 256, 64, zeros=(0, 15)),
    "7 tokens, group 64": PackedCase(4, 64, 7, 192, 128, zeros=(15, 0, 8)),
    "16 tokens, group 32": PackedCase(4, 32, 16, 192, 64, zeros=(0, 15, 16, 3)),
    "33 tokens, whole column": PackedCase(4, 192, 33, 192, 64, zeros=(5,)),
    "symmetric, float16": PackedCase(4, 64, 9, 128, 64, dtype="float16"),
    "8 bits, group 32": PackedCase(8, 32, 8, 192, 64, zeros=(0, 255, 128)),
    "8 bits, whole column, symmetric": PackedCase(8, 128, 17, 128, 128),
    "8 bits, group 128, float16": PackedCase(8, 128, 3, 256, 64, zeros=(1, 254), dtype="float16"),
}


def interpreted(run, *args, **kwargs):
    """The finished result: other work of JAX beside a running interpreter, which calls back into Python, can wait for
    it and it for that, for ever."""
    return jax.block_until_ready(run(*args, **kwargs))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_definition(name):
    """Several tiles, stages that are used again, two ranges of the inner axis, padded tokens."""
    case = CASES[name]
    run = partial(quantized_matmul, bits=case.bits, group_size=case.group_size)
    got = interpreted(run, *case.arguments(), implementation="mosaic", interpret=INTERPRET)
    assert got.dtype == jnp.dtype(case.dtype)
    assert got.shape == (case.num_tokens, case.out_size)
    assert row_errors(got, case.exact()) <= TOLERANCE[case.dtype]


def test_many_tokens_are_multiplied_as_by_xla(monkeypatch):
    """From one token more than the kernel takes on; to the bit."""
    monkeypatch.setattr("octavo.pallas_kernels.quantized_matmul.MAX_KERNEL_TOKENS", 4)
    monkeypatch.setattr(mosaic, "quantized_matmul_mosaic", None)
    case = PackedCase(4, 32, 5, 64, 64, zeros=(1, 14))
    got = quantized_matmul(*case.arguments(), bits=4, group_size=32, implementation="mosaic", interpret=INTERPRET)
    assert (got == quantized_matmul(*case.arguments(), bits=4, group_size=32)).all()


SMALL = PackedCase(4, 32, 6, 320, 128, zeros=(0, 15, 9))
"""Two warpgroups; five tiles in one range, three more than there are stages."""


def error_of_small(arguments: tuple | None = None, **tuning_changes) -> float:
    """The kernel traced afresh, so that what a test patched in it takes effect."""
    tuning = mosaic_tuning(6, SMALL.out_size, SMALL.in_size, bits=4, group_size=32, interpreted=True)
    tuning = replace(tuning, **{"num_splits": 1, **tuning_changes})
    run = partial(mosaic.quantized_matmul_mosaic, bits=4, out_dtype=jnp.bfloat16, tuning=tuning, interpret=INTERPRET)
    got = interpreted(jax.jit(run), *(SMALL.arguments() if arguments is None else arguments))
    return row_errors(got, SMALL.exact())


def swap_nibbles(x, packed, scale, zero):
    return x, (packed & 0x0F0F0F0F) << 4 | (packed >> 4) & 0x0F0F0F0F, scale, zero


def zero_off_by_one(x, packed, scale, zero):
    return x, packed, scale, zero + 1


def scale_of_the_next_group(x, packed, scale, zero):
    return x, packed, jnp.roll(scale, -1, axis=1), zero


def no_zero(x, packed, scale, zero):
    return x, packed, scale, None


@pytest.mark.parametrize("mutate", [None, swap_nibbles, zero_off_by_one, scale_of_the_next_group, no_zero])
def test_mutated_arguments_are_caught(mutate):
    error = error_of_small(mutate(*SMALL.arguments()) if mutate else None)
    assert error <= 5e-3 if mutate is None else error > 4e-2


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_stages_and_splits_do_not_show(stages, num_splits):
    """Ranges of unequal length; more stages than tiles."""
    assert error_of_small(stages=stages, num_splits=num_splits) <= 5e-3


def test_tokens_up_to_the_limit_go_through_the_kernel():
    """Tiles of tokens side by side, each with its own columns of the result."""
    case = PackedCase(8, 64, 40, 64, 64)
    tuning = mosaic_tuning(40, 64, 64, bits=8, group_size=64, interpreted=True)
    assert config.MAX_KERNEL_TOKENS >= 64
    assert tuning.tile_tokens < 40
    run = partial(mosaic.quantized_matmul_mosaic, bits=8, out_dtype=jnp.float32, tuning=tuning, interpret=INTERPRET)
    assert row_errors(interpreted(jax.jit(run), *case.arguments()), case.exact()) <= 5e-3
