"""Plain weights to integers and float8: grids, GPTQ's compensation and AWQ's scales, against NumPy in float64."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantized_model import words

from octavo.models.architectures import get_architecture
from octavo.models.config import ModelConfig
from octavo.models.errors import ModelConfigError
from octavo.models.quantization import activation_aware, compensation
from octavo.models.quantization.activation_aware import (
    Inputs,
    fold_norm,
    folds,
    round_with_clipping,
    search_scales,
)
from octavo.models.quantization.compensation import round_with_compensation
from octavo.models.quantization.packing import pack, pack_awq, unpack, unpack_awq
from octavo.models.quantization.rounding import IntegerGrid, storable_scales, to_float8

CASES = json.loads((Path(__file__).parent / "goldens" / "cases.json").read_text(encoding="utf-8"))
FOLDED = {"granite", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3"}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def weight(out_size: int = 24, in_size: int = 64, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((out_size, in_size)) * 0.1).astype(np.float32)


def moments(in_size: int = 64, num_inputs: int = 400, seed: int = 2) -> np.ndarray:
    """Of inputs that depend on each other, some channels much larger."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((num_inputs, in_size)) @ rng.standard_normal((in_size, in_size))
    inputs *= np.where(rng.random(in_size) < 0.1, 20.0, 1.0)
    return (inputs.T @ inputs / num_inputs).astype(np.float32)


def error(plain: np.ndarray, other: np.ndarray, of: np.ndarray) -> float:
    difference = plain.astype(np.float64) - other
    return float(np.sum(difference @ of.astype(np.float64) * difference))


# ---- grids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [IntegerGrid(4, 32), IntegerGrid(8, 32, False, 1), IntegerGrid(4, None, True)])
def test_no_code_is_nearer(grid: IntegerGrid) -> None:
    plain = weight()
    rounded = grid.nearest(plain)
    groups = plain.reshape(*rounded.scales.shape, -1).astype(np.float64)
    every = np.arange(grid.top + 1)
    values = (every - rounded.zeros[..., None, None]) * rounded.scales[..., None, None].astype(np.float64)
    nearest = np.abs(groups[..., None] - values).min(-1)
    found = np.abs(groups - rounded.plain().reshape(groups.shape))
    np.testing.assert_allclose(found, nearest, atol=1e-7)
    # A symmetric range has its last code for negative numbers only.
    assert (found <= (1.01 if grid.symmetric else 0.501) * rounded.scales[..., None] + 1e-7).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_zero_points_that_the_first_gptq_format_cannot_store(bits: int, sign: int) -> None:
    """Groups on one side of zero; all of them stay within their range."""
    plain = np.abs(weight()) * sign
    rounded = IntegerGrid(bits, 32, lowest_zero=1).nearest(plain)
    assert rounded.zeros.min() >= 1
    found = np.abs(rounded.plain() - plain).reshape(24, 2, 32)
    assert (found <= 0.501 * rounded.scales[..., None] + 1e-7).all()
    assert (IntegerGrid(bits, 32).nearest(plain).zeros.min() == 0) == (sign > 0)


def test_scales_are_the_same_in_both_16_bit_types() -> None:
    scales = np.asarray(storable_scales(jnp.asarray(10.0 ** np.linspace(-12, 6, 500), jnp.float32)))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(scales.astype(dtype).astype(np.float32), scales)
    assert scales.min() > 0
    asked = (10.0 ** np.linspace(-12, 6, 500)).astype(np.float32)
    middle = (asked > 1e-4) & (asked < 6e4)
    np.testing.assert_allclose(scales[middle], asked[middle], rtol=2**-7)
    assert (scales >= asked)[middle].all()
    assert (np.asarray(IntegerGrid(4, 32).nearest(np.zeros((2, 64), np.float32)).plain()) == 0).all()


@pytest.mark.parametrize("per_channel", [True, False])
def test_float8(per_channel: bool) -> None:
    plain = weight() * np.geomspace(1, 100, 24, dtype=np.float32)[:, None]
    codes, scales = to_float8(plain, per_channel=per_channel)
    assert scales.shape == ((24, 1) if per_channel else (1,))
    np.testing.assert_allclose(codes.astype(np.float32) * scales, plain, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    assert np.abs(codes.astype(np.float32)).max(axis=1).min() > (400 if per_channel else 1)


def test_packing() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (6, 40)).astype(np.uint8)
    np.testing.assert_array_equal(pack_awq(codes), words(codes, 4, AWQ_NIBBLES))
    assert (pack_awq(codes) != words(codes, 4)).any()
    np.testing.assert_array_equal(unpack_awq(pack_awq(codes)), codes)
    for bits in (4, 8):
        codes = np.random.default_rng(0).integers(0, 1 << bits, (6, 40)).astype(np.uint8)
        np.testing.assert_array_equal(pack(codes, bits), words(codes, bits))
        np.testing.assert_array_equal(unpack(pack(codes, bits), bits), codes)


# ---- GPTQ -----------------------------------------------------------------------------------


def slow_gptq(plain: np.ndarray, of: np.ndarray, grid: IntegerGrid) -> np.ndarray:
    """The paper's recursion over an explicit inverse, column by column, in float64."""
    values, size = plain.astype(np.float64), grid.group_size or plain.shape[1]
    damped = of.astype(np.float64) + 0.01 * np.diagonal(of).mean() * np.eye(len(of))
    inverse, result = np.linalg.inv(damped), np.zeros_like(values)
    for column in range(plain.shape[1]):
        if column % size == 0:
            fit = grid.fit(jnp.asarray(values[:, column : column + size], jnp.float32))
            scales, zeros = (np.asarray(found, np.float64) for found in fit)
        codes = np.clip(np.rint(values[:, column] / scales) + zeros, 0, grid.top)
        result[:, column] = (codes - zeros) * scales
        step = (values[:, column] - result[:, column]) / inverse[column, column]
        values -= np.outer(step, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


@pytest.mark.parametrize("group", [16, 64, 192, None])
def test_compensation_is_the_paper_s(group: int | None) -> None:
    """Groups that end inside, at and beyond the block of columns that are worked on together."""
    plain, of, grid = weight(16, 192), moments(192, 800), IntegerGrid(4, group)
    found, expected = round_with_compensation(plain, of, grid).plain(), slow_gptq(plain, of, grid)
    assert np.isclose(found, expected, atol=1e-6).mean() > 0.97  # float32 against float64: ties fall differently
    assert error(plain, found, of) < 1.02 * error(plain, expected, of)


def test_compensation_errs_less_than_rounding() -> None:
    plain, of, grid = weight(), moments(), IntegerGrid(4, 32)
    nearest = error(plain, grid.nearest(plain).plain(), of)
    assert error(plain, round_with_compensation(plain, of, grid).plain(), of) < 0.8 * nearest
    wrong = moments(seed=5)
    assert error(plain, round_with_compensation(plain, wrong, grid).plain(), of) > 0.8 * nearest


def test_without_dependence_there_is_nothing_to_compensate() -> None:
    plain, grid = weight(), IntegerGrid(4, 32)
    found = round_with_compensation(plain, np.eye(64, dtype=np.float32), grid)
    np.testing.assert_array_equal(found.codes, grid.nearest(plain).codes)


def test_inputs_that_never_occur_or_are_too_few() -> None:
    plain, of = weight(), moments(num_inputs=5)
    of[7], of[:, 7] = 0, 0
    found = round_with_compensation(plain, of, IntegerGrid(4, 32)).plain()
    assert np.isfinite(found).all()
    assert (found[:, 7] == 0).all()
    of[3, 3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        round_with_compensation(plain, of, IntegerGrid(4, 32))


def test_damping_grows_until_the_moments_can_be_inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    of = np.ones((64, 64), np.float32)
    of[0, 1] = of[1, 0] = 1.3  # not positive definite, as rounding errors leave it
    found = round_with_compensation(weight(), of, IntegerGrid(4, 32), damping=1e-3).plain()
    assert np.isfinite(found).all()
    monkeypatch.setattr(compensation, "_DAMPING_STEPS", 1)
    with pytest.raises(ValueError, match="undefined"):
        round_with_compensation(weight(), of, IntegerGrid(4, 32), damping=1e-3)


# ---- AWQ ------------------------------------------------------------------------------------


def inputs() -> Inputs:
    of = moments()
    return Inputs(of, np.sqrt(np.diagonal(of)).astype(np.float32))


def test_scales_that_were_searched_err_less() -> None:
    plain, given, grid = weight(), inputs(), IntegerGrid(4, 32)
    scales = search_scales([plain[:8], plain[8:]], given, np.arange(64), grid)
    nearest = error(plain, grid.nearest(plain).plain(), given.moments)
    assert error(plain, grid.nearest(plain * scales).plain() / scales, given.moments) < 0.7 * nearest
    large = given.magnitudes > np.median(given.magnitudes) * 5
    assert scales[large].min() > 2 * scales[~large].max()


def test_columns_that_share_a_producer_share_a_scale() -> None:
    channels = np.repeat(np.arange(32), 2)
    scales = search_scales([weight()], inputs(), channels, IntegerGrid(4, 32))
    assert scales.shape == (32,)
    assert len(np.unique(scales)) > 20


def test_narrower_ranges_err_less_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, of, grid = weight(), moments(), IntegerGrid(4, 32)
    plain[::3, 5] *= 8  # outliers that nothing depends on
    of[5], of[:, 5] = 0, 0

    def by_group(other: np.ndarray) -> np.ndarray:
        return np.asarray(
            [
                [error(plain[row, g], other[row, g], of[g, g]) for g in (slice(0, 32), slice(32, 64))]
                for row in (np.s_[r : r + 1] for r in range(len(plain)))
            ]
        )

    nearest = by_group(grid.nearest(plain).plain())
    clipped = by_group(round_with_clipping(plain, of, grid).plain())
    assert (clipped <= nearest * (1 + 1e-4)).all()
    assert clipped[::3, 0].sum() < 0.5 * nearest[::3, 0].sum()
    monkeypatch.setattr(activation_aware, "_SHRINKS", (1.0,))
    activation_aware._best_shrinks.clear_cache()
    np.testing.assert_allclose(by_group(round_with_clipping(plain, of, grid).plain()), nearest, rtol=1e-4)
    activation_aware._best_shrinks.clear_cache()


@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_norm_and_the_scales_that_rounding_it_left(dtype: type, plus_one: bool) -> None:
    rng = np.random.default_rng(4)
    stored = rng.uniform(0.2, 2, 64).astype(dtype)
    stored[5] = -1 if plus_one else 0
    asked = rng.uniform(0.3, 3, 64).astype(np.float32)
    divided, scales = fold_norm(stored, asked, plus_one=plus_one)
    assert divided.dtype == stored.dtype
    before, after = (array.astype(np.float64) + plus_one for array in (stored, divided))
    np.testing.assert_allclose(after * scales, before, rtol=1e-6, atol=1e-7)
    others = np.arange(64) != 5
    np.testing.assert_allclose(scales[others], asked[others], rtol=2**-6)
    if dtype is not np.float32:
        assert np.abs(after * asked - before).max() > 1e-4  # what the scales asked for would have cost


@pytest.mark.parametrize("case", [case for case in CASES if "moe" not in case and case != "mixtral"])
def test_decoders_whose_channels_can_be_scaled(case: str) -> None:
    config = ModelConfig.from_dict(CASES[case])
    architecture = get_architecture(config.architecture)
    decoder = architecture.decoder_config(config)
    if any(case.startswith(name) for name in FOLDED):
        found = folds(decoder, architecture.names, "x.")
        assert [fold.linear for fold in found] == ["qkv", "o", "gate_up", "down"]
        assert [len(fold.channels) for fold in found][1] == decoder.q_size
    else:
        with pytest.raises(ModelConfigError, match="use gptq or fp8"):
            folds(decoder, architecture.names, "x.")
