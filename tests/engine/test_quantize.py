"""``octavo quantize``: what is written is loaded as the weights that its codes stand for, by each method."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest_paths import CACHE_FOLDER
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tiny_model import PAIRS, add_tokenizer, tiny_model

from octavo import LLM, SamplingParams
from octavo.engine.calibration import Samples
from octavo.engine.config import ModelOptions
from octavo.engine.errors import ConfigError
from octavo.engine.quantize import QuantizeOptions, quantize
from octavo.models.architectures import get_architecture
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.loading.safetensors_source import SafetensorsSource
from octavo.models.quantization.weights import dequantize

MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds this column of its eight."""
OPTIONS: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq", "group_size": 32},
    "gptq": {"method": "gptq", "group_size": 32},
    "gptq-8-asym": {"method": "gptq", "group_size": 32, "bits": 8, "symmetric": False},
    "gptq-4-asym": {"method": "gptq", "group_size": 32, "symmetric": False},
    "fp8": {"method": "fp8"},
    "fp8-tensor": {"method": "fp8", "per_channel": False},
}


def nibbles(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """i32 [rows, words] → [rows, words * 32 / bits], one number at a time."""
    count = 32 // bits
    found = np.zeros((len(words), words.shape[1] * count), np.int64)
    for place in range(found.shape[1]):
        word, nibble = divmod(place, count)
        column = place if order is None else word * count + order[nibble]
        found[:, column] = words[:, word].astype(np.int64) >> (bits * nibble) & ((1 << bits) - 1)
    return found


def reference(tensors: dict[str, np.ndarray], name: str, config: dict[str, Any], wrong: str = "") -> np.ndarray:
    """f32 [out, in], from the description of the format; ``wrong`` makes one mistake."""
    get = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    method = config["quant_method"]
    if method == "compressed-tensors":
        return get["weight"].astype(np.float32) * get["weight_scale"]
    scales = get["scales"].astype(np.float32).T
    if method == "awq":
        order = None if wrong == "order" else AWQ_NIBBLES
        codes = nibbles(get["qweight"], 4, order).T
        zeros = nibbles(get["qzeros"], 4, order).T
    else:
        codes = nibbles(get["qweight"].T, config["bits"])
        zeros = nibbles(get["qzeros"], config["bits"]).T + (0 if wrong == "zero" else 1)
        assert (get["g_idx"] == np.arange(codes.shape[1]) // config["group_size"]).all()
    wide = np.repeat(np.arange(scales.shape[1]), config["group_size"])
    return (codes - zeros[:, wide]).astype(np.float32) * scales[:, wide]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """As they are in the files, float8 included."""
    source = SafetensorsSource(folder)
    return {name: source.raw(name) for name in source.tensors}


def load(folder: Path, dtype: Any = jnp.float32) -> Any:
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, config, dtype=dtype, mesh=MESH, load_format=model.format)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("plain") / "model", **SIZES))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(np.random.default_rng(3).choice(PAIRS.split(), 4000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(plain: Path, text: Path) -> dict[str, Path]:
    """One folder for each of ``OPTIONS``, and one for each without calibration."""
    folders = {}
    for name, options in OPTIONS.items():
        samples = None if "fp8" in name else Samples(text, count=6, length=24)
        for suffix, chosen in {"": samples, "-nearest": None}.items():
            folders[name + suffix] = plain.parent / (name + suffix)
            quantize(ModelOptions(str(plain)), QuantizeOptions(**options, samples=chosen), folders[name + suffix])
    return folders


@pytest.mark.parametrize("name", [*OPTIONS, *(f"{name}-nearest" for name in OPTIONS if "fp8" not in name)])
def test_it_is_loaded_as_the_weights_that_the_format_says(made: dict[str, Path], name: str) -> None:
    folder = made[name]
    tensors, config = stored_tensors(folder), config_of(folder)
    wrongs = {"awq": "order", "gptq": "zero"}
    for dtype in (jnp.float32, jnp.bfloat16):
        for index, layer in enumerate(load(folder, dtype)["layers"]):
            for part, modules in LINEARS.items():
                block = "attention" if part in ("qkv", "o") else "mlp"
                found = np.asarray(dequantize(layer[block][part]["weight"], jnp.float32))
                names = [f"model.layers.{index}.{module}" for module in modules]
                expected = np.concatenate([reference(tensors, module, config) for module in names])
                np.testing.assert_array_equal(found, expected)
                if wrong := wrongs.get(config["quant_method"]):
                    other = np.concatenate([reference(tensors, module, config, wrong) for module in names])
                    assert (found != other).mean() > 0.5
