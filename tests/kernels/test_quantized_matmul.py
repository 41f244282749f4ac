"""Products with packed weights in plain JAX, which runs everywhere; what is refused; sizes by reasoning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_weights import PackedCase, row_errors

from octavo.pallas_kernels.quantized_matmul import float8_matmul, mosaic_obstacle, quantized_matmul
from octavo.pallas_kernels.quantized_matmul.config import MosaicTuningConfig, mosaic_tuning
from octavo.pallas_kernels.quantized_matmul.reference import quantized_matmul_reference

CASES = {
    "4 bits, zeros 0 and 15": PackedCase(4, 32, 5, 96, 24, zeros=(0, 15, 7)),
    "4 bits, symmetric": PackedCase(4, 64, 1, 128, 16),
    "4 bits, one group": PackedCase(4, 72, 3, 72, 8, zeros=(3,)),
    "8 bits, zeros 0 and 255": PackedCase(8, 16, 33, 64, 12, zeros=(0, 255, 128)),
    "8 bits, symmetric": PackedCase(8, 128, 2, 128, 8, dtype="float16"),
    "4 bits, float32": PackedCase(4, 8, 4, 40, 10, zeros=(16, 0, 9), dtype="float32"),
}
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_definition(name):
    case = CASES[name]
    got = quantized_matmul_reference(*case.arguments(), bits=case.bits)
    assert got.dtype == jnp.float32
    assert row_errors(got, case.exact()) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_xla_agrees(name):
    case = CASES[name]
    got = quantized_matmul(*case.arguments(), bits=case.bits, group_size=case.group_size)
    assert got.dtype == jnp.dtype(case.dtype)
    assert row_errors(got, case.exact()) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_has_its_value(bits):
    """Rows of the unit matrix pick out single weights: every code, in every place of a word."""
    case = PackedCase(bits, 8, 64, 64, 64, zeros=(2, 2**bits - 1), dtype="float32")
    _, packed, _, zero = case.arguments()
    scale = jnp.ones((64, 8), jnp.float32)
    got = quantized_matmul(jnp.eye(64), packed, scale, zero, bits=bits, group_size=8)
    np.testing.assert_array_equal(np.asarray(got).T, case.codes() - np.repeat(case.zero_points(), 8, axis=1))


def swapped_nibbles(x, packed, scale, zero):
    return x, (packed & 0x0F0F0F0F) << 4 | (packed >> 4) & 0x0F0F0F0F, scale, zero


def zero_off_by_one(x, packed, scale, zero):
    return x, packed, scale, zero + 1


def scale_of_the_next_group(x, packed, scale, zero):
    return x, packed, jnp.roll(scale, -1, axis=1), zero


@pytest.mark.parametrize("mutate", [swapped_nibbles, zero_off_by_one, scale_of_the_next_group])
def test_mutations_are_caught(mutate):
    case = CASES["4 bits, zeros 0 and 15"]
    got = quantized_matmul(*mutate(*case.arguments()), bits=4, group_size=32)
    assert row_errors(got, case.exact()) > 2 * TOLERANCE["bfloat16"]


def given(**changes):
    """Good arguments, with changes."""
    x, packed, scale, zero = CASES["4 bits, zeros 0 and 15"].arguments()
    return {"x": x, "packed": packed, "scale": scale, "zero": zero, "bits": 4, "group_size": 32, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits must be one of 4, 8; got 3"),
        ({"x": jnp.zeros((5, 95), jnp.bfloat16)}, r"x must be \[T, 96\] in a floating type; got bfloat16 \[5, 95\]"),
        ({"x": jnp.zeros((5, 96), jnp.int32)}, r"x must be \[T, 96\] in a floating type; got int32"),
        ({"packed": jnp.zeros((24, 12), jnp.uint32)}, r"packed must be int32 \[out, words\]; got uint32 \[24, 12\]"),
        ({"group_size": 36}, "group_size 36 does not divide the 96 columns of the weight"),
        ({"group_size": 0}, "group_size 0 does not divide"),
        ({"group_size": 48}, r"scale must be \[24, 2\] in a floating type; got bfloat16 \[24, 3\]"),
        ({"scale": jnp.zeros((24, 3), jnp.int8)}, r"scale must be \[24, 3\] in a floating type; got int8 \[24, 3\]"),
        ({"zero": jnp.zeros((24, 3), jnp.uint8)}, r"zero must be int8 \[24, 3\]; got uint8 \[24, 3\]"),
        ({"zero": jnp.zeros((24,), jnp.int8)}, r"zero must be int8 \[24, 3\]; got int8 \[24\]"),
        ({"implementation": "triton"}, "implementation must be one of xla, mosaic; got 'triton'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        quantized_matmul(**given(**changes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((128, 256, 128, "float32"), "x of float32: the mosaic kernel takes bfloat16, float16"),
        ((96, 256, 128, "bfloat16"), "96 output rows: the mosaic kernel takes a multiple of 64"),
        ((128, 288, 288, "bfloat16"), "288 input columns: the mosaic kernel takes a multiple of 64"),
        ((128, 256, 16, "bfloat16"), "group_size 16: the mosaic kernel takes 32 or a multiple of 64"),
        ((128, 192, 96, "bfloat16"), "group_size 96: the mosaic kernel takes 32 or a multiple of 64"),
        ((128, 256, 128, "float16"), None),
    ],
)
def test_what_the_kernel_cannot_serve_is_named(sizes, message):
    obstacle = mosaic_obstacle(*sizes)
    assert obstacle == message
    if message is None:
        return
    x, packed = jnp.zeros((1, sizes[1]), sizes[3]), jnp.zeros((sizes[0], sizes[1] // 8), jnp.int32)
    scale = jnp.zeros((sizes[0], sizes[1] // sizes[2]), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        quantized_matmul(x, packed, scale, bits=4, group_size=sizes[2], implementation="mosaic")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warpgroups": 5}, "warpgroups must be 1 to 4; got 5"),
        ({"tile_tokens": 12}, "tile_tokens must be a multiple of 8 from 8 to 128; got 12"),
        ({"tile_in": 48}, "tile_in must be 64, 128 or 256; got 48"),
        ({"stages": 1}, "stages must be at least 2; got 1"),
        ({"num_splits": 0}, "num_splits must be at least 1; got 0"),
    ],
)
def test_bad_tuning_is_named(changes, message):
    good = MosaicTuningConfig(warpgroups=2, tile_tokens=8, tile_in=128, stages=4, num_splits=1)
    with pytest.raises(ValueError, match=message):
        replace(good, **changes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 64, 65, 256])
@pytest.mark.parametrize(
    ("out_size", "in_size", "group_size"),
    [(28672, 4096, 128), (6144, 4096, 32), (4096, 14336, 128), (3584, 18944, 128), (37888, 3584, 3584), (64, 1216, 32)],
)
def test_reasoned_sizes_fit(out_size, in_size, group_size, num_tokens, bits):
    """Tiles cover the weight and lie in whole groups, two thread blocks fit a multiprocessor, no range is empty."""
    tuning = mosaic_tuning(num_tokens, out_size, in_size, bits=bits, group_size=group_size)
    assert out_size % tuning.tile_out == 0
    assert in_size % tuning.tile_in == 0
    assert tuning.tile_in % group_size == 0 or group_size % tuning.tile_in == 0
    assert tuning.tile_tokens >= min(num_tokens, 64)
    assert tuning.num_splits <= in_size // tuning.tile_in
    assert tuning.stages * tuning.tile_in * (tuning.tile_out * bits / 8 + 2 * tuning.tile_tokens) <= 112 * 1024


def test_weights_with_few_rows_are_split_more():
    """4096 rows are 32 thread blocks, too few for the GPU; 28672 are enough."""
    few = mosaic_tuning(8, 4096, 14336, bits=4, group_size=128)
    many = mosaic_tuning(8, 28672, 4096, bits=4, group_size=128)
    assert few.num_splits >= 4 > many.num_splits


def test_the_result_may_be_wider():
    case = CASES["4 bits, symmetric"]
    got = quantized_matmul(*case.arguments(), bits=4, group_size=64, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    assert (got != got.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_layers_share_one_trace():
    case = CASES["4 bits, symmetric"]
    x, packed, scale, _ = case.arguments()

    def layers(x):
        return [quantized_matmul(x, packed, scale, bits=4, group_size=64) for _ in range(2)]

    calls = [e.params["jaxpr"] for e in jax.make_jaxpr(layers)(x).eqns if "jaxpr" in e.params]
    assert len(calls) == 2
    assert calls[0] is calls[1]


def float8_operands():
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn) for shape in ((5, 32), (12, 32)))
    x_scale, weight_scale = (jnp.asarray(rng.uniform(0.5, 2, size), jnp.float32) for size in (5, 12))
    return {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale}


@pytest.mark.parametrize("per_tensor", [False, True])
def test_float8_is_scaled_after_the_product(per_tensor):
    given = float8_operands()
    if per_tensor:
        given |= {"x_scale": jnp.float32(3.0), "weight_scale": jnp.float32(0.25)}
    exact = {name: np.asarray(value, np.float64) for name, value in given.items()}
    want = exact["x"] @ exact["weight"].T * np.reshape(exact["x_scale"], (-1, 1)) * exact["weight_scale"]
    assert row_errors(float8_matmul(**given, out_dtype=jnp.float32), want) <= 1e-6
    rounded = float8_matmul(**given)
    assert rounded.dtype == jnp.bfloat16
    assert row_errors(rounded, want) <= 4e-3
    swapped = given | {"x_scale": 2 * given["x_scale"]}
    assert row_errors(float8_matmul(**swapped), want) > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.zeros((5, 32), jnp.bfloat16)}, r"x must be float8_e4m3fn with two axes; got bfloat16 \[5, 32\]"),
        ({"weight": jnp.zeros((12, 16), jnp.float8_e4m3fn)}, "the inner sizes differ"),
        ({"x_scale": jnp.zeros((12,))}, r"x_scale must be \[5\] or one number; got \[12\]"),
        ({"weight_scale": jnp.zeros((12, 1))}, r"weight_scale must be \[12\] or one number; got \[12, 1\]"),
    ],
)
def test_float8_arguments_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        float8_matmul(**{**float8_operands(), **changes})
