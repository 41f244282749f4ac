"""The parts of a layer against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.decoder_config import RopeSpec
from octavo.models.errors import ModelConfigError
from octavo.models.layers import linear
from octavo.models.layers.linear import Linear, matmul
from octavo.models.layers.norm import rms_norm
from octavo.models.layers.rope import apply_rope, inverse_frequencies, rope_table


def relative_error(found: jax.Array, expected: np.ndarray) -> float:
    difference = np.linalg.norm(np.asarray(found, np.float64) - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize("tokens", [1, 2, 17, 48, 49, 130])
def test_matmul_is_the_same_on_either_side(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x, weight = rng.standard_normal((tokens, 96)), rng.standard_normal((40, 96))
    found = jax.jit(matmul)(x.astype(np.float32), weight.astype(np.float32))
    assert found.shape == (tokens, 40)
    assert relative_error(found, x @ weight.T) < 1e-5
    assert relative_error(found, x @ weight[::-1].T) > 1e-2


@pytest.mark.parametrize(("tokens", "left"), [(1, False), (2, True), (48, True), (49, False)])
def test_few_tokens_put_the_weights_left_on_cpu(tokens: int, left: bool) -> None:
    arguments = jnp.zeros((tokens, 96)), jnp.zeros((40, 96))
    compiled = jax.jit(matmul).lower(*arguments).compile().as_text()
    assert ("f32[40,%d]" % tokens in compiled) == left  # noqa: UP031
    assert "conditional" not in compiled


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_products_are_summed_in_float32(tokens: int, out_dtype: jnp.dtype) -> None:
    """4096 terms of 1/4096; a bfloat16 sum would stop growing at 1/8."""
    x = jnp.full((tokens, 4096), 1 / 64, jnp.bfloat16)
    weight = jnp.full((2, 4096), 1 / 64, jnp.bfloat16)
    found = matmul(x, weight, out_dtype=out_dtype)
    assert found.dtype == out_dtype
    assert np.all(np.asarray(found, np.float32) == 1.0)


def test_matmul_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"x \(3, 5\) by weight \(4, 6\)"):
        matmul(jnp.zeros((3, 5)), jnp.zeros((4, 6)))


@pytest.mark.parametrize("limit", [10**9, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_weights_give_their_parts(limit: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once or, where the product would be too large, one by one: which it was shows in the shapes multiplied."""
    monkeypatch.setattr(linear, "MAX_FUSED_BYTES", limit)
    rng = np.random.default_rng(0)
    x, weight, offset = rng.standard_normal((5, 8)), rng.standard_normal((9, 8)), rng.standard_normal(9) * bias
    layer = Linear(8, 9, bias=bias, dtype=jnp.dtype(jnp.float32))
    layer.weight[...] = jnp.asarray(weight, jnp.float32)
    if layer.bias is not None:
        layer.bias[...] = jnp.asarray(offset, jnp.float32)
    products = []
    multiply = linear.matmul
    monkeypatch.setattr(linear, "matmul", lambda x, w, **kw: products.append(w.shape[0]) or multiply(x, w, **kw))
    parts = layer.split(jnp.asarray(x, jnp.float32), (4, 3, 2), 1)
    for part, (start, end) in zip(parts, ((0, 4), (4, 7), (7, 9)), strict=True):
        assert relative_error(part, x @ weight[start:end].T + offset[start:end]) < 1e-5
    assert products == ([9] if limit else [4, 3, 2])


def test_linear_bias() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((5, 8)), rng.standard_normal((6, 8)), rng.standard_normal(6)
    layer = Linear(8, 6, bias=True, dtype=jnp.dtype(jnp.float32))
    layer.weight[...], layer.bias[...] = jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32)
    found = layer(jnp.asarray(x, jnp.float32))
    assert relative_error(found, x @ weight.T + bias) < 1e-5
    assert relative_error(found, x @ weight.T) > 1e-2


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(plus_one: bool) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((4, 32)) * 100, rng.standard_normal(32)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.5) * (weight + plus_one)
    x32, weight32 = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    assert relative_error(rms_norm(x32, weight32, eps=0.5, plus_one=plus_one), expected) < 1e-5
    assert relative_error(rms_norm(x32, weight32, eps=0.5, plus_one=not plus_one), expected) > 1e-2


def test_rms_norm_does_not_overflow_in_a_narrow_type() -> None:
    """300 squared is beyond float16."""
    found = rms_norm(jnp.full((1, 64), 300, jnp.float16), jnp.ones(64, jnp.float16), eps=1e-6)
    assert found.dtype == jnp.float16
    assert np.all(np.asarray(found) == 1.0)


def test_rope_turns_pairs_by_position_times_frequency() -> None:
    spec = RopeSpec(theta=50.0, rotary_dim=6)
    rng = np.random.default_rng(2)
    x, positions = rng.standard_normal((5, 2, 10)), np.array([0, 3, 4, 1000, 77], np.int32)
    frequencies = 50.0 ** (-np.array([0, 2, 4]) / 6)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * positions[:, None, None] * frequencies)
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], -1)
    found = apply_rope(jnp.asarray(x, jnp.float32), rope_table(jnp.asarray(positions), spec))
    assert relative_error(found, expected) < 1e-4
    assert relative_error(found, np.concatenate([turned.imag, turned.real, x[..., 6:]], -1)) > 1e-2


def test_inverse_frequencies_are_exact_at_the_far_end() -> None:
    """In float32 throughout the slowest wave of a large theta is off by 1e-6; in float64 it is not."""
    found = inverse_frequencies(RopeSpec(theta=1e7, rotary_dim=128))
    assert found.dtype == np.float64
    assert abs(found[-1] / 10.0 ** (-7 * 126 / 128) - 1) < 1e-14


def test_yarn_keeps_fast_waves_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=128))
    yarn = inverse_frequencies(RopeSpec(kind="yarn", theta=1e4, rotary_dim=128, factor=8.0, original_max_position=4096))
    ratio = plain / yarn
    assert ratio[0] == 1.0
    assert abs(ratio[-1] - 8.0) < 1e-12
    assert np.all(np.diff(ratio) >= 0)


def test_rope_spec_refuses() -> None:
    with pytest.raises(ModelConfigError, match="needs original_max_position"):
        RopeSpec(kind="yarn", theta=1e4, rotary_dim=8, factor=2.0)
    with pytest.raises(ModelConfigError, match="must be positive and even, got 7"):
        RopeSpec(theta=1e4, rotary_dim=7)
