"""Numbers in quantised checkpoints that no sound file has: each refuses and names its tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from quantized_model import CASES, write_quantized
from safetensors.numpy import save_file

from octavo.models.architectures import get_architecture
from octavo.models.loading import quantized_formats, quantized_reader
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.loading.safetensors_source import SafetensorsSource
from octavo.models.quantization.weights import dequantize

UP = "model.layers.0.mlp.up_proj"
SCALES = {
    "awq-32": "scales",
    "gptq-4": "scales",
    "gptq-4-sym": "scales",
    "ct-pack-4": "weight_scale",
    "ct-int": "weight_scale",
    "ct-float-channel": "weight_scale",
    "fp8": "weight_scale",
    "fp8-blocks": "weight_scale_inv",
    "fbgemm": "weight_scale",
}
Change = Callable[[np.ndarray], np.ndarray]


def load(folder: Path) -> Any:
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, config, dtype=jnp.bfloat16, mesh=mesh, load_format=model.format)


def read(folder: Path) -> dict[str, np.ndarray]:
    """In memory: the file is about to be written anew."""
    source = SafetensorsSource(folder)
    return {name: np.array(source.raw(name)) for name in source.tensors}


def changed(tmp_path: Path, case: str, suffix: str, change: Change) -> Path:
    folder = write_quantized(tmp_path, CASES[case]) / "quantized"
    tensors = read(folder)
    tensors[f"{UP}.{suffix}"] = np.ascontiguousarray(change(tensors[f"{UP}.{suffix}"]))
    save_file(tensors, folder / "model.safetensors")
    return folder


def one(value: float, dtype: Any = None) -> Change:
    """The last number of a tensor replaced."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.astype(dtype or array.dtype)
        array.reshape(-1)[-1] = value
        return array

    return change


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", SCALES)
def test_a_scale_that_is_not_finite_refuses(tmp_path: Path, case: str, value: float) -> None:
    folder = changed(tmp_path, case, SCALES[case], one(value))
    with pytest.raises(LoadError, match=rf"'{UP}\.{SCALES[case]}': a scale: expected a finite number, found -?(nan|i)"):
        load(folder)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.float32])
def test_it_does_so_in_every_type_of_scales(tmp_path: Path, dtype: Any) -> None:
    folder = changed(tmp_path, "fp8-blocks", "weight_scale_inv", one(np.nan, dtype))
    with pytest.raises(LoadError, match="weight_scale_inv': a scale: expected a finite number, found nan"):
        load(folder)


def test_scales_of_nothing_but_zeros_are_read(tmp_path: Path) -> None:
    """A group of zeros has one."""
    for case, suffix in SCALES.items():
        load(changed(tmp_path / case, case, suffix, np.zeros_like))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -0.5])
@pytest.mark.parametrize("case", ["fp8-static", "ct-float-static"])
def test_a_scale_of_activations_is_a_positive_number(tmp_path: Path, case: str, value: float) -> None:
    folder = changed(tmp_path, case, "input_scale", one(value))
    with pytest.raises(LoadError, match=rf"'{UP}\.input_scale': a scale: expected a positive number"):
        load(folder)


def test_numbers_are_looked_at_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: without the look, they load."""
    folder = changed(tmp_path, "gptq-4", "scales", one(np.nan))
    monkeypatch.setattr(quantized_reader.Module, "finite", lambda self, suffix, scales: scales)
    assert not np.isfinite(np.asarray(load(folder)["layers"][0]["mlp"]["gate_up"]["weight"].scale, np.float32)).all()


def with_index(tmp_path: Path, change: Change) -> Path:
    """Columns in order, which each module's index says in its own way."""
    folder = write_quantized(tmp_path, CASES["ct-pack-4"]) / "quantized"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read(folder)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        index = np.arange(tensors[name].shape[1] * 8, dtype=np.int32) // 32
        tensors[name.replace("weight_packed", "weight_g_idx")] = change(index).astype(np.int32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain_down(folder: Path) -> np.ndarray:
    weight = load(folder)["layers"][0]["mlp"]["down"]["weight"]
    values = np.asarray(dequantize(weight, jnp.float32))
    ordered = np.empty_like(values)
    ordered[:, np.asarray(weight.permutation)] = values
    return ordered


def test_an_index_that_is_not_set_means_columns_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_down(with_index(tmp_path / "order", lambda index: index))
    unset = with_index(tmp_path / "unset", lambda index: np.full_like(index, -1))
    np.testing.assert_array_equal(plain_down(unset), expected)
    # Mutation: -1 as a number of a group is the last one.
    reader = quantized_formats.PackQuantizedReader
    monkeypatch.setattr(reader, "group_index", lambda self: self.module.raw("weight_g_idx"))
    monkeypatch.setattr(quantized_reader.Module, "check_groups", lambda *_: None)
    assert np.abs(plain_down(unset) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda index: index * 100, "100"),
        (lambda index: index + 1, "[23]"),
        (lambda index: np.where(index == 1, -1, index), "-1"),
        (lambda index: index - 2, "-2"),
    ],
)
def test_an_index_of_groups_that_are_not_there_refuses(tmp_path: Path, change: Change, found: str) -> None:
    with pytest.raises(LoadError, match=rf"weight_g_idx': a column's group: expected 0 to \d, found {found}"):
        load(with_index(tmp_path, change))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (np.array(0, np.float16), r"shape: expected \(96,\), found \(\)"),
        (np.zeros((96, 2), np.float16), r"shape: expected \(96,\), found \(96, 2\)"),
        (np.zeros(95, np.float16), r"shape: expected \(96,\), found \(95,\)"),
        (np.zeros(0, np.float16), r"shape: expected \(96,\), found \(0,\)"),
        (np.zeros(96, np.int32), r"dtype: expected .*, found I32"),
        (np.ones(96, np.float16), "up_proj.bias"),
    ],
)
@pytest.mark.parametrize("case", ["awq-32", "gptq-4"])
def test_a_bias_that_the_model_has_not_is_one_of_zeros(
    tmp_path: Path, case: str, bias: np.ndarray, message: str
) -> None:
    folder = write_quantized(tmp_path, CASES[case]) / "quantized"
    for bias_there, refuses in ((np.zeros(96, np.float16), False), (bias, True)):
        save_file({**read(folder), f"{UP}.bias": bias_there}, folder / "model.safetensors")
        if not refuses:
            load(folder)
            continue
        with pytest.raises(LoadError, match=message):
            load(folder)
