"""A mixture of experts against every expert applied to every token; padding; and what it takes in memory."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models.decoder_config import DecoderConfig, LayerSpec, MoESpec
from octavo.models.errors import ModelConfigError
from octavo.models.layers.moe import MoE, block_rows, choose_grouped_mlp, grouped_mlp, route
from octavo.models.sharding import Placement
from octavo.pallas_kernels.aot import aot_missing, compile_for
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import gpu_interpreter

HIDDEN, FFN, EXPERTS, CHOSEN = 32, 48, 6, 2
SPECS = {
    "normalised": MoESpec(EXPERTS, CHOSEN, FFN),
    "as they are": MoESpec(EXPERTS, CHOSEN, FFN, normalize_weights=False),
    "shared": MoESpec(EXPERTS, CHOSEN, FFN, normalize_weights=False, shared_intermediate_size=40),
}


def layer(spec: MoESpec) -> tuple[MoE, Any]:
    """With random weights, and those as a tree."""
    config = DecoderConfig(64, HIDDEN, FFN, 4, 4, 8, (LayerSpec(None, moe=spec),), 1e-6)
    moe = MoE(config, spec, dtype=jnp.dtype(jnp.float32), placement=Placement())
    graphdef, state = nnx.split(moe)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, nnx.to_pure_dict(state))
    return nnx.merge(graphdef, drawn), drawn


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    return (silu(gate) * up) @ down.T


def dense(x: np.ndarray, params: Any, spec: MoESpec) -> np.ndarray:
    """Every expert on every token, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(x, np.float64)
    logits = x @ params["router"]["weight"].T
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    best = np.argsort(-odds, axis=-1)[:, : spec.experts_per_token]
    weights = np.zeros_like(odds)
    np.put_along_axis(weights, best, np.take_along_axis(odds, best, -1), -1)
    if spec.normalize_weights:
        weights /= weights.sum(-1, keepdims=True)
    experts = params["experts"]
    pairs = zip(experts["gate_up"]["weight"], experts["down"]["weight"], strict=True)
    result = sum(weights[:, [i]] * gated(x, *pair) for i, pair in enumerate(pairs))
    if spec.shared_intermediate_size is None:
        return result
    shared = gated(x, params["shared"]["gate_up"]["weight"], params["shared"]["down"]["weight"])
    return result + shared / (1 + np.exp(-(x @ params["shared_gate"]["weight"].T)))


def error_of(found: Any, expected: np.ndarray) -> float:
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_is_every_expert_weighted(spec: MoESpec) -> None:
    moe, params = layer(spec)
    for tokens in (1, 37):
        x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)
        found = moe(jnp.asarray(x), jnp.ones(tokens, bool))
        assert error_of(found, dense(x, params, spec)) < 1e-5
        wrong = MoESpec(EXPERTS, CHOSEN, FFN, not spec.normalize_weights, spec.shared_intermediate_size)
        assert error_of(found, dense(x, params, wrong)) > 1e-2


def test_all_tokens_may_choose_one_expert() -> None:
    """None is dropped, however full an expert is."""
    spec = SPECS["normalised"]
    moe, params = layer(spec)
    router = np.zeros((EXPERTS, HIDDEN), np.float32)
    router[3], router[5] = 1.0, 0.5
    x = np.abs(np.random.default_rng(1).standard_normal((200, HIDDEN))).astype(np.float32)
    moe.router.weight[...] = jnp.asarray(router)
    found = moe(jnp.asarray(x), jnp.ones(200, bool))
    assert error_of(found, dense(x, {**params, "router": {"weight": router}}, spec)) < 1e-5


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_padding_goes_to_no_expert_and_harms_nobody(value: float) -> None:
    spec = SPECS["normalised"]
    moe, params = layer(spec)
    x = np.random.default_rng(2).standard_normal((40, HIDDEN)).astype(np.float32)
    live = np.arange(40) % 3 != 1
    x[~live] = value
    found = np.asarray(moe(jnp.asarray(x), jnp.asarray(live)))
    assert error_of(found[live], dense(x[live], params, spec)) < 1e-5
    assert not found[~live].any()
    routing = route(jnp.asarray(x) @ params["router"]["weight"].T, jnp.asarray(live), spec)
    assert int(routing.group_ends[-1]) == CHOSEN * live.sum()


def test_no_token_at_all() -> None:
    moe, _ = layer(SPECS["normalised"])
    assert not np.asarray(moe(jnp.full((8, HIDDEN), jnp.nan), jnp.zeros(8, bool))).any()


def test_router_sums_in_float32() -> None:
    """Two experts whose logits differ by less than bfloat16 resolves: the better one is found."""
    spec = MoESpec(2, 1, FFN)
    logits = jnp.asarray([[100.0, 100.1]], jnp.float32)
    assert np.asarray(route(logits, jnp.ones(1, bool), spec).group_ends).tolist() == [0, 1]
    assert np.asarray(route(logits.astype(jnp.bfloat16), jnp.ones(1, bool), spec).group_ends).tolist() == [1, 1]
    config = DecoderConfig(64, HIDDEN, FFN, 4, 4, 8, (LayerSpec(None, moe=spec),), 1e-6)
    moe = MoE(config, spec, dtype=jnp.dtype(jnp.bfloat16), placement=Placement())
    assert moe.router.float32(jnp.ones((1, HIDDEN), jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("spoiled", [False, True], ids=["finite", "some not finite"])
def test_rows_are_put_in_order_alike_by_sorting_and_by_pairs(tokens: int, spoiled: bool) -> None:
    """And as NumPy has it: experts in order, an expert's rows in the order of their tokens."""
    spec, rng = SPECS["normalised"], np.random.default_rng(tokens)
    logits = rng.standard_normal((tokens, EXPERTS)).astype(np.float32)
    live = rng.random(tokens) < 0.7
    if spoiled:
        logits[::3] = np.nan
        logits[1::4, 2] = np.inf
    sorting, pairs = (route(jnp.asarray(logits), jnp.asarray(live), spec, by_pairs=way) for way in (False, True))
    np.testing.assert_allclose(sorting.weights, pairs.weights, rtol=1e-6)
    for left, right in zip(sorting._replace(weights=0), pairs._replace(weights=0), strict=True):
        np.testing.assert_array_equal(left, right)
    places, starts = np.asarray(pairs.places), np.append(0, pairs.group_ends)
    assert sorted(places.ravel()) == list(range(tokens * CHOSEN))
    assert (np.asarray(pairs.tokens)[places] == np.arange(tokens)[:, None]).all()
    assert (places[live] < starts[-1]).all()
    assert (places[~live] >= starts[-1]).all()
    for start, end in itertools.pairwise(starts):
        assert (np.diff(np.asarray(pairs.tokens)[start:end]) > 0).all()
    if not spoiled:
        expert = np.searchsorted(starts[1:], places[live], side="right")
        assert (expert == np.argsort(-logits[live], axis=1, kind="stable")[:, :CHOSEN]).all()


def test_nothing_of_all_tokens_times_all_experts() -> None:
    rows, experts, hidden, ffn = 512, 32, 64, 64
    shapes = ((rows, hidden), (experts, 2 * ffn, hidden), (experts, hidden, ffn))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)

    def temporaries(function: Any) -> int:
        memory = jax.jit(function).lower(*arrays, sizes).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    def ragged_dot(x: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, gate_up.swapaxes(1, 2), sizes)

    blow_up = rows * experts * hidden * 4
    assert temporaries(lambda *a: grouped_mlp(*a, activation="silu")) < blow_up / 4
    assert temporaries(ragged_dot) >= blow_up  # what this is instead of


@pytest.mark.parametrize(("rows", "experts", "expected"), [(8, 128, 2), (1, 8, 1), (512, 128, 8), (4096, 8, 64)])
def test_rows_of_a_block(rows: int, experts: int, expected: int) -> None:
    assert block_rows(rows, experts) == expected


def test_experts_the_kernel_cannot_serve_are_multiplied_in_plain_jax(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mosaic, bfloat16 = Placement("mosaic"), jnp.dtype(jnp.bfloat16)
    assert choose_grouped_mlp(2048, 768, bfloat16, mosaic) is not grouped_mlp
    assert not caplog.records
    assert choose_grouped_mlp(2048, 768, bfloat16, Placement()) is grouped_mlp
    assert choose_grouped_mlp(2048, 352, bfloat16, mosaic) is grouped_mlp
    assert "[2048, 352]" in caplog.text
    caplog.clear()
    assert choose_grouped_mlp(2048, 768, jnp.dtype(jnp.float32), mosaic) is grouped_mlp
    assert "float32" in caplog.text


@pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_kernels_layer_is_every_expert_weighted(activation: str) -> None:
    """Interpreted; the padding is NaN, and so is what the kernel leaves of its rows."""
    spec, bfloat16 = MoESpec(2, 1, 64), jnp.dtype(jnp.bfloat16)
    config = DecoderConfig(64, 64, 64, 4, 4, 8, (LayerSpec(None, moe=spec),), 1e-6, activation=activation)
    placement = Placement("mosaic", interpret=gpu_interpreter())
    graphdef, state = nnx.split(MoE(config, spec, dtype=bfloat16, placement=placement))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, bfloat16), state)
    x = jnp.asarray(rng.standard_normal((3, 64)), bfloat16).at[1].set(jnp.nan)
    live = np.array([True, False, True])
    found = np.asarray(nnx.merge(graphdef, params)(x, jnp.asarray(live)), np.float32)
    other = MoE(config, spec, dtype=jnp.dtype(jnp.float32), placement=Placement())
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    expected = np.asarray(nnx.merge(nnx.split(other)[0], wide)(x.astype(jnp.float32), jnp.asarray(live)))
    assert error_of(found[live], expected[live]) < 2e-2
    assert error_of(found[live], expected[live][::-1]) > 0.5
    assert not found[~live].any()


@pytest.mark.skipif(aot_missing() is not None, reason=str(aot_missing()))
def test_what_a_layer_launches_on_an_h200() -> None:
    """Of Qwen3-30B-A3B, 64 tokens: the router, softmax and top-k; four launches that put rows in order and cut them up;
    the rows; two products, the first with its activation; the sum."""
    spec = MoESpec(128, 8, 768)
    config = DecoderConfig(64, 2048, 768, 4, 4, 8, (LayerSpec(None, moe=spec),), 1e-6)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    moe = nnx.eval_shape(lambda: MoE(config, spec, dtype=bfloat16, placement=Placement("mosaic")))
    graphdef, state = nnx.split(moe)

    def layer(params: Any, x: jax.Array, live: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x, live)

    x, live = jax.ShapeDtypeStruct((64, 2048), bfloat16), jax.ShapeDtypeStruct((64,), jnp.bool_)
    report = compile_for("h200", layer, nnx.to_pure_dict(state), x, live)
    assert sum(report.launches.values()) <= 12, report.thunks
    assert [kernel.spill_bytes for kernel in report.kernels] == [0] * len(report.kernels)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"experts_per_token": 7}, "7 experts per token"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size"),
    ],
)
def test_impossible_mixtures_refuse(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        MoESpec(**{"num_experts": 6, "experts_per_token": 2, "intermediate_size": 8, **changes})
