"""Quantised checkpoints, each packed by the test itself: every weight is exactly the one that its codes stand for."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from quantized_model import CASES, CONFIG, F8, gptq, words, write_quantized
from safetensors.numpy import load_file, save_file

from octavo.models.architectures import get_architecture
from octavo.models.errors import ModelConfigError
from octavo.models.layers.linear import _float8_product, matmul
from octavo.models.loading import quantized_formats
from octavo.models.loading.dummy import dummy_params
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.quantization.packing import pack, unpack
from octavo.models.quantization.weights import Float8Weight, IntWeight, PartedWeight, dequantize, unpack_codes


def load(folder: Path, *, quantization: str | None = None, dtype: Any = jnp.float32, **overrides: Any) -> Any:
    model = resolve_model(str(folder), quantization=quantization, hf_overrides=overrides)
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, config, dtype=dtype, mesh=mesh, load_format=model.format)


def linears(params: Any) -> dict[str, Any]:
    layer = params["layers"][0]
    pairs = [("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down")]
    return {name: layer[block][name]["weight"] for block, name in pairs}


def plain(weight: Any) -> np.ndarray:
    """f32 [out, in], columns in the model's order."""
    if isinstance(weight, PartedWeight):
        return np.concatenate([plain(part) for part in weight.parts])
    if isinstance(weight, jax.Array):
        return np.asarray(weight)
    values = np.asarray(dequantize(weight, jnp.float32))
    if isinstance(weight, IntWeight) and weight.permutation is not None:
        ordered = np.empty_like(values)
        ordered[:, np.asarray(weight.permutation)] = values
        return ordered
    return values


def check_same(found: Any, expected: Any) -> None:
    for name, weight in linears(expected).items():
        assert np.isfinite(plain(weight)).all()
        np.testing.assert_array_equal(plain(linears(found)[name]), plain(weight), err_msg=name)
    np.testing.assert_array_equal(found["embed"]["weight"], expected["embed"]["weight"])


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_codes_stand_for(tmp_path: Path, name: str) -> None:
    folder = write_quantized(tmp_path, CASES[name])
    params = load(folder / "quantized")
    check_same(params, load(folder / "plain"))
    kinds = {type(weight) for weight in jax.tree.leaves(linears(params), is_leaf=lambda x: not isinstance(x, dict))}
    assert kinds - {PartedWeight} <= {IntWeight, Float8Weight, type(params["embed"]["weight"])}
    quantized = sum(leaf.nbytes for leaf in jax.tree.leaves(linears(params)))
    assert quantized < 0.5 * sum(leaf.nbytes for leaf in jax.tree.leaves(linears(load(folder / "plain"))))


def test_products_meet_the_right_columns(tmp_path: Path) -> None:
    """x times each kind of weight, columns out of order and parts side by side included."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.float32)
    for name in ("awq-32", "gptq-4-act", "fp8-static", "fp8-blocks", "ct-int"):
        weight = linears(load(write_quantized(tmp_path / name, CASES[name]) / "quantized"))["qkv"]
        expected = np.asarray(x) @ plain(weight).T
        np.testing.assert_allclose(np.asarray(matmul(x, weight)), expected, rtol=1e-5, atol=1e-5, err_msg=name)
        if name == "gptq-4-act":
            parts = [dataclasses.replace(part, permutation=jnp.arange(64)) for part in weight.parts]
            assert np.abs(np.asarray(matmul(x, PartedWeight(tuple(parts)))) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("awq-32", {"unpack_awq": lambda stored: unpack(stored, 4)}),
        ("gptq-4", {"unpack": lambda stored, bits: unpack(stored, bits)[:, np.arange(stored.shape[1] * 8) ^ 1]}),
        ("gptq-3", {"unpack": lambda stored, bits: unpack(stored << 1, bits)}),
    ],
)
def test_an_order_of_codes_that_is_wrong_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mutate: dict[str, Any]
) -> None:
    folder = write_quantized(tmp_path, CASES[name])
    for function, replacement in mutate.items():
        monkeypatch.setattr(quantized_formats, function, replacement)
    with pytest.raises((AssertionError, LoadError)):
        check_same(load(folder / "quantized"), load(folder / "plain"))


def test_zero_points_that_are_off_by_one_are_told_apart(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, gptq(4, 32, v2=False))
    quantization = json.loads((folder / "quantized" / "config.json").read_text())["quantization_config"]
    found = load(folder / "quantized", quantization_config={**quantization, "checkpoint_format": "gptq_v2"})
    with pytest.raises(AssertionError):
        check_same(found, load(folder / "plain"))


def test_zero_points_reach_both_ends(tmp_path: Path) -> None:
    for name in ("awq-32", "gptq-4-v2", "ct-pack-4-asym"):
        zero = linears(load(write_quantized(tmp_path / name, CASES[name]) / "quantized"))["o"].zero
        assert (int(zero.min()), int(zero.max())) == (-8, 7), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_there_and_back(bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    np.testing.assert_array_equal(unpack(words(values, bits), bits), values)
    if bits in (4, 8):
        signed = (values - (1 << (bits - 1))).astype(np.int8)
        stored = pack(signed, bits)
        np.testing.assert_array_equal(stored, words(signed.astype(np.int64), bits))
        np.testing.assert_array_equal(unpack_codes(jnp.asarray(stored), bits), signed)


@pytest.mark.parametrize(("method", "limit"), [("fp8", 0.035), ("int8", 0.01), ("int4", 0.12)])
def test_plain_weights_are_quantised_while_they_are_loaded(tmp_path: Path, method: str, limit: float) -> None:
    folder = write_quantized(tmp_path, CASES["fp8"])
    expected, found = linears(load(folder / "plain")), linears(load(folder / "plain", quantization=method))
    for name, weight in expected.items():
        assert isinstance(found[name], Float8Weight if method == "fp8" else IntWeight)
        error = np.linalg.norm(plain(found[name]) - plain(weight)) / np.linalg.norm(plain(weight))
        assert 0 < error < limit, (name, error)


def test_float8_activations_are_near(tmp_path: Path) -> None:
    """What a GPU computes: float8 by float8, with the scales after."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.float32)
    for name in ("fp8", "fp8-static"):
        weight = linears(load(write_quantized(tmp_path / name, CASES[name]) / "quantized"))["o"]
        expected = np.asarray(x) @ plain(weight).T
        found = np.asarray(_float8_product(x, weight, jnp.dtype(jnp.float32)))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 1e-4 < error < 0.05, name
        wrong = dataclasses.replace(weight, scale=weight.scale * 1.1)
        found = np.asarray(_float8_product(x, wrong, jnp.dtype(jnp.float32)))
        assert np.linalg.norm(found - expected) > 0.08 * np.linalg.norm(expected)


def _rewrite(folder: Path, change: Any) -> None:
    """The stored tensors, changed; float8 is not read."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "gptq-4",
            lambda t: t.update({Q + "g_idx": t[Q + "g_idx"][::-1].copy()}),
            "out of order, but desc_act is false",
        ),
        ("gptq-4-act", lambda t: t.pop(Q + "g_idx"), "lacks .*q_proj.g_idx"),
        ("gptq-4-act", lambda t: t[Q + "g_idx"].__setitem__(0, 9), "q_proj.g_idx.*expected 0 to 1, found 9"),
        ("gptq-4-act", lambda t: t[Q + "g_idx"].__setitem__(slice(9), 0), "q_proj: g_idx has groups of other sizes"),
        ("gptq-4", lambda t: t[Q + "qzeros"].__setitem__(0, -1), "stored as 15, which .* some programs"),
        ("gptq-4-sym", lambda t: t[Q + "qzeros"].__setitem__(0, 0x88888888 - 2**32), "expected 7, found 8"),
        (
            "awq-32",
            lambda t: t.update({Q + "scales": t[Q + "scales"][:1].copy()}),
            r"q_proj.scales.*expected \(2, 64\)",
        ),
        ("awq-32", lambda t: t.update({Q + "scales": t[Q + "scales"].astype(np.int32)}), "q_proj.scales.*dtype"),
        ("awq-32", lambda t: t.update({Q + "g_idx": np.zeros(64, np.int32)}), "that the model does not use"),
        ("awq-32", lambda t: t.update({Q + "bias": np.ones(64, np.float32)}), "q_proj.bias"),
        ("ct-pack-4", lambda t: t[Q + "weight_shape"].__setitem__(0, 63), r"weight_shape.*found \(63, 64\)"),
        ("ct-int", lambda t: t.pop(Q + "weight_scale"), "lacks .*q_proj.weight_scale"),
    ],
)
def test_a_checkpoint_that_is_not_of_its_format_refuses(tmp_path: Path, name: str, change: Any, match: str) -> None:
    folder = write_quantized(tmp_path, CASES[name]) / "quantized"
    _rewrite(folder, change)
    with pytest.raises(LoadError, match=match):
        load(folder)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["gptq-4"])
    _rewrite(folder / "quantized", lambda t: t.update({Q + "bias": np.zeros(64, np.float16)}))
    check_same(load(folder / "quantized"), load(folder / "plain"))


def test_float8_of_another_kind_refuses(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["fp8"]) / "quantized"
    with pytest.raises(ModelConfigError, match="fmt 'e5m2' is not supported"):
        load(folder, quantization_config={"fmt": "e5m2"})
    assert F8(448) == 448


def test_a_mixture_of_methods_by_name(tmp_path: Path) -> None:
    """GPTQ's ``dynamic``: down in 8 bits, k left plain, by regular expressions."""
    four, eight = gptq(4, 32), gptq(8, 32)
    case = dataclasses.replace(
        four,
        quantization={**four.quantization, "dynamic": {r"+:.*\.down_proj": {"bits": 8}, r"-:.*k_proj": {}}},
        store=lambda weight: (eight if weight.shape == (64, 96) else four).store(weight),
        skipped=("k_proj",),
    )
    folder = write_quantized(tmp_path, case)
    params = load(folder / "quantized")
    check_same(params, load(folder / "plain"))
    found = linears(params)
    assert (found["down"].bits, found["o"].bits) == (8, 4)
    assert [type(part) for part in found["qkv"].parts][::2] == [IntWeight, IntWeight]
    assert found["qkv"].parts[1].shape == (32, 64)


def test_sizes_that_fill_no_words_refuse(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path, CASES["awq-32"], **{**CONFIG, "intermediate_size": 96})
    with pytest.raises(ModelConfigError, match="multiple of 8 columns"):
        load(folder / "quantized", intermediate_size=92)


def test_dummies_of_quantised_weights_are_weights(tmp_path: Path) -> None:
    """Random, finite and about as large as plain dummies."""
    for name in ("awq-32", "gptq-4-act", "fp8"):
        folder = write_quantized(tmp_path / name, CASES[name]) / "quantized"
        model = resolve_model(str(folder), load_format="dummy")
        config = get_architecture(model.config.architecture).decoder_config(model.config)
        params = dummy_params(config, dtype=jnp.float32, mesh=Mesh(np.array(jax.devices()[:1]), ("tp",)))
        for weight in linears(params).values():
            values = plain(weight)
            assert 0.01 < values.std() < 0.04, name
            assert len(np.unique(values)) > 10
