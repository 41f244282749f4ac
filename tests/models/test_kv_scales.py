"""A float8 KV cache: what is written to the pool, and the scales that checkpoints carry for it."""

import logging
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tiny_model import tiny_model

from octavo.models.architectures import get_architecture
from octavo.models.kv_cache import KVCacheSpec, write_kv
from octavo.models.loading.dummy import dummy_params
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.pallas_kernels.float8 import as_numbers

MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))


# ---- writing --------------------------------------------------------------------------------


def written(k, pool_dtype, kv_scales=None) -> np.ndarray:
    """Keys and values of one head, written to the slots from 1 on; the pool's numbers ``[slots, 2, H]``."""
    k = jnp.asarray(k)[:, None]
    pool = jnp.zeros((2, 2, 1, 4, k.shape[2]), pool_dtype)
    scales = None if kv_scales is None else jnp.asarray(kv_scales, jnp.float32)
    pool = jax.jit(write_kv)(pool, k, -k, jnp.arange(1, 1 + len(k)), scales)
    return np.asarray(as_numbers(pool).astype(jnp.float32)).transpose(0, 3, 1, 2, 4).reshape(8, 2, -1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_float8_cannot_hold_saturates_and_nan_stays(dtype):
    """A plain cast gives NaN from 465 on, which would poison every later token of the sequence."""
    k = jnp.asarray([[1.0, 448.0, 464.0, 466.0], [1000.0, jnp.inf, -jnp.inf, jnp.nan]], dtype)
    keys = written(k, jnp.uint8)[1:3, 0]
    np.testing.assert_array_equal(keys, [[1, 448, 448, 448], [448, 448, -448, np.nan]])
    assert not np.isfinite(np.asarray(k.astype(jnp.float8_e4m3fn), np.float32)[0, 3])


def test_scales_divide_what_is_written():
    pool = written([[6.0, 3.0], [9000.0, 0.0]], jnp.uint8, (2.0, 0.5))
    np.testing.assert_array_equal(pool[1], [[3.0, 1.5], [-12.0, -6.0]])
    np.testing.assert_array_equal(pool[2], [[448.0, 0.0], [-448.0, 0.0]])
    assert not pool[[0, *range(3, 8)]].any()


def test_a_narrower_pool_of_16_bits_saturates_and_a_wider_one_does_not():
    k = jnp.asarray([[1e5, -1e30, 7.0]], jnp.bfloat16)
    np.testing.assert_array_equal(written(k, jnp.float16)[1, 0], [65504.0, -65504.0, 7.0])
    np.testing.assert_array_equal(written(k, jnp.float32)[1, 0], np.asarray(k, np.float32)[0])


@pytest.mark.parametrize("pool_dtype", [jnp.uint8, jnp.float8_e4m3fn, jnp.bfloat16])
def test_padding_is_dropped(pool_dtype):
    pool = jnp.zeros((2, 2, 1, 4, 2), pool_dtype)
    new = write_kv(pool, jnp.ones((2, 1, 2)), jnp.ones((2, 1, 2)), jnp.asarray([8, 800]))
    assert not np.asarray(as_numbers(new).astype(jnp.float32)).any()


def test_a_block_of_float8_takes_half_of_one_of_16_bits():
    blocks = [KVCacheSpec(3, 12, 2, 16, 64, jnp.dtype(dtype)).bytes_per_block for dtype in ("uint8", "bfloat16")]
    assert 2 * blocks[0] == blocks[1] == 3 * 2 * 2 * 16 * 64 * 2


# ---- scales ---------------------------------------------------------------------------------


def add_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return folder


def layer_tensors(layer: int, **tensors: float) -> dict[str, np.ndarray]:
    """Scalars below a layer's attention; ``__`` in a name is a dot."""
    prefix = f"model.layers.{layer}.self_attn."
    return {prefix + name.replace("__", "."): np.asarray(value, np.float32) for name, value in tensors.items()}


def load_scales(folder: Path, scales_kv: bool = True) -> list[list[float]]:
    """[k, v] of each layer; [] without scales."""
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    config = replace(architecture.decoder_config(model.config), scales_kv=scales_kv)
    params = load_params(model.path, architecture, config, dtype=jnp.float32, mesh=MESH, load_format=model.format)
    found = [layer["attention"].get("kv_scales") for layer in params["layers"]]
    assert all(scales is None or (scales.dtype == jnp.float32 and scales.shape == (2,)) for scales in found)
    return [] if found[0] is None else [np.asarray(scales).tolist() for scales in found]


FORMS = [
    ("k_scale", "v_scale"),
    ("attn__k_scale", "attn__v_scale"),
    ("k_proj__k_scale", "v_proj__v_scale"),
    ("k_proj__output_scale", "v_proj__output_scale"),
    ("qkv_proj__k_scale", "qkv_proj__v_scale"),
]


@pytest.mark.parametrize("names", FORMS)
def test_scales_are_found_under_every_name(tmp_path, caplog, names):
    tensors = layer_tensors(0, **dict(zip(names, (0.25, 2.0), strict=True)))
    tensors |= layer_tensors(1, **dict(zip(names, (0.5, 4.0), strict=True)), q_scale=1.0, prob_output_scale=1.0)
    folder = add_tensors(tiny_model(tmp_path), tensors)
    with caplog.at_level(logging.WARNING):
        assert load_scales(folder) == [[0.25, 2.0], [0.5, 4.0]]
        assert load_scales(folder, scales_kv=False) == []
    assert "float8 KV cache" not in caplog.text


def test_one_scale_for_both_and_other_forms_of_a_number(tmp_path):
    tensors = layer_tensors(0, kv_scale=0.75)
    tensors["model.layers.1.self_attn.k_scale"] = np.asarray([0.5], ml_dtypes.bfloat16)
    tensors["model.layers.1.self_attn.v_scale"] = np.asarray(0.25, np.float16)
    assert load_scales(add_tensors(tiny_model(tmp_path), tensors)) == [[0.75, 0.75], [0.5, 0.25]]


@pytest.mark.parametrize("layers", [(), (1,)])
def test_without_scales_they_are_one_and_that_is_said_once(tmp_path, caplog, layers):
    tensors = {}
    for layer in layers:
        tensors |= layer_tensors(layer, k_scale=0.5, v_scale=2.0)
    folder = add_tensors(tiny_model(tmp_path), tensors)
    with caplog.at_level(logging.WARNING):
        assert load_scales(folder) == [[0.5, 2.0] if layer in layers else [1.0, 1.0] for layer in (0, 1)]
    said = [record.getMessage() for record in caplog.records if "no scales" in record.getMessage()]
    assert len(said) == 1
    assert f"{2 - len(layers)} of 2 layers" in said[0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": 0.5}, r"layers\.0\.self_attn\.k_scale.*a scale of keys or of values but not both"),
        ({"v_scale": 0.5}, r"layers\.0\.self_attn\.v_scale.*but not both"),
        ({"k_scale": 0.0, "v_scale": 1.0}, r"k_scale.*expected a positive number, found 0\.0"),
        ({"k_scale": 1.0, "v_scale": -1.0}, r"v_scale.*expected a positive number, found -1\.0"),
        ({"k_scale": 1.0, "v_scale": float("nan")}, r"v_scale.*expected a positive number, found nan"),
        ({"k_scale": [1.0, 2.0], "v_scale": [1.0, 2.0]}, r"k_scale.*expected one, found \(2,\)"),
        ({"k_zero_point": 1.0, "k_scale": 1.0, "v_scale": 1.0}, r"does not use: .*k_zero_point"),
    ],
)
def test_scales_that_cannot_be_served_are_named(tmp_path, tensors, message):
    folder = add_tensors(tiny_model(tmp_path), layer_tensors(0, **tensors))
    with pytest.raises(LoadError, match=message):
        load_scales(folder)


def test_scales_of_dummy_weights_are_one(tmp_path):
    model = resolve_model(str(tiny_model(tmp_path)))
    config = get_architecture(model.config.architecture).decoder_config(model.config)
    params = dummy_params(replace(config, scales_kv=True), dtype=jnp.bfloat16, mesh=MESH)
    assert [layer["attention"]["kv_scales"].tolist() for layer in params["layers"]] == [[1.0, 1.0]] * 2
