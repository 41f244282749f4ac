"""Weights that the compressed-tensors library itself quantised, stored and read back: Octavo reads the same, exactly.

The files are made by ``goldens/make_compressed_tensors.py``.
"""

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
from quantized_model import CONFIG, write_stored
from tiny_model import _tensors

from octavo.models.architectures import get_architecture
from octavo.models.layers.linear import matmul
from octavo.models.loading import quantized_formats
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.quantization.weights import Float8Weight, IntWeight, dequantize

GOLDENS = Path(__file__).resolve().parent / "goldens" / "compressed_tensors"
CASES = sorted(file.stem for file in GOLDENS.glob("*.npz"))
K, DOWN = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"
Change = Callable[[dict[str, np.ndarray]], None]


def write_golden(folder: Path, case: str, change: Change | None = None) -> dict[str, np.ndarray]:
    """A checkpoint with the two stored weights among plain ones; what the library read back, by module."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        config, dtypes = (json.loads(str(golden[key])) for key in ("config", "dtypes"))
        arrays = {name: golden[name] for name in golden.files}
    stored = {}
    for name, dtype in dtypes.items():
        wide = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}.get(dtype, dtype)
        stored[name] = arrays[f"stored/{name}"].view(wide)
    if change is not None:
        change(stored)
    rng = np.random.default_rng(0)
    tensors = _tensors(CONFIG, lambda *shape: rng.standard_normal(shape).astype(np.float32))
    others = {name: value for name, value in tensors.items() if name.removesuffix(".weight") not in (K, DOWN)}
    config["ignore"] = ["lm_head", r"re:.*\.(q|v|o|gate|up)_proj$"]
    write_stored(folder, {**CONFIG, "quantization_config": config}, {**others, **stored})
    return {module: arrays[f"plain/{module}"] for module in (K, DOWN)}


def load(folder: Path, dtype: Any) -> dict[str, Any]:
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    config = architecture.decoder_config(model.config)
    layer = load_params(model.path, architecture, config, dtype=dtype, mesh=mesh, load_format=model.format)["layers"][0]
    return {K: layer["attention"]["qkv"]["weight"].parts[1], DOWN: layer["mlp"]["down"]["weight"]}


def dtype_of(case: str) -> Any:
    """Of the scales, in which the library computes what it reads back."""
    return jnp.float32 if case == "pack-4-group-asym" else jnp.bfloat16


def check(folder: Path, case: str, change: Change | None = None) -> dict[str, Any]:
    expected = write_golden(folder, case, change)
    weights = load(folder, dtype_of(case))
    for module, weight in weights.items():
        assert isinstance(weight, Float8Weight if case.startswith("float") else IntWeight)
        values = np.asarray(dequantize(weight, dtype_of(case)), np.float32)
        if isinstance(weight, IntWeight) and weight.permutation is not None:
            ordered = np.empty_like(values)
            ordered[:, np.asarray(weight.permutation)] = values
            values = ordered
        np.testing.assert_array_equal(values, expected[module], err_msg=module)
    return weights


def test_there_are_all_of_them() -> None:
    assert len(CASES) == 15
    assert {case.partition("-")[0] for case in CASES} == {"pack", "int", "float"}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_library_reads(tmp_path: Path, case: str) -> None:
    weights = check(tmp_path, case)
    for weight in weights.values():
        if not isinstance(weight, IntWeight):
            continue
        assert (weight.zero is not None) == ("asym" in case or case == "pack-4-act-order")
        if weight.zero is not None:  # rows of one sign have their zero point at an end, but for bfloat16's rounding
            limit = 1 << (weight.bits - 1)
            assert int(weight.zero.min()) == -limit
            assert int(weight.zero.max()) >= limit - weight.bits // 4
        assert (weight.permutation is not None) == (case == "pack-4-act-order")


def test_bits_and_groups_are_those_of_the_configuration(tmp_path: Path) -> None:
    mixed = check(tmp_path / "mixed", "pack-4-and-8")
    assert [(mixed[name].bits, mixed[name].scale.shape[1]) for name in (K, DOWN)] == [(8, 1), (4, 3)]
    activations = {}
    for case in ("float-8-tensor-static", "float-8-channel", "float-8-block", "float-8-weights-only"):
        write_golden(tmp_path / case, case)
        activations[case] = load(tmp_path / case, jnp.bfloat16)[DOWN].activations
    assert list(activations.values()) == ["static", "token", "none", "none"]


@pytest.mark.parametrize("case", ["pack-4-act-order", "pack-4-group-asym", "int-8-channel-asym", "float-8-block"])
def test_products_are_those_of_the_plain_weight(tmp_path: Path, case: str) -> None:
    expected = write_golden(tmp_path, case)
    for module, weight in load(tmp_path, jnp.float32).items():
        x = np.random.default_rng(1).standard_normal((5, weight.shape[1])).astype(np.float32)
        wanted = x @ expected[module].T
        error = np.abs(np.asarray(matmul(jnp.asarray(x), weight)) - wanted).max() / np.abs(wanted).max()
        assert error < (1e-6 if dtype_of(case) == jnp.float32 else 5e-3), module


def in_down(tensor: str, alter: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(stored: dict[str, np.ndarray]) -> None:
        stored[f"{DOWN}.{tensor}"] = np.ascontiguousarray(alter(stored[f"{DOWN}.{tensor}"]))

    return change


def swap_nibbles(words: np.ndarray) -> np.ndarray:
    return (words & 0x0F0F0F0F) << 4 | words >> 4 & 0x0F0F0F0F


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("pack-4-group", in_down("weight_packed", swap_nibbles)),
        ("pack-4-group-asym", in_down("weight_zero_point", swap_nibbles)),
        ("pack-4-group", in_down("weight_scale", lambda scale: np.roll(scale, 1, axis=1))),
        ("pack-4-act-order", in_down("weight_g_idx", lambda index: np.roll(index, 1))),
        ("pack-8-group", in_down("weight_packed", lambda words: words.byteswap())),
        ("int-8-channel-asym", in_down("weight_zero_point", lambda zero: zero ^ np.int8(1))),
        ("float-8-block", in_down("weight_scale", lambda scale: np.roll(scale, 1, axis=0))),
    ],
)
def test_another_layout_is_told_apart(tmp_path: Path, case: str, change: Change) -> None:
    with pytest.raises(AssertionError, match="down_proj"):
        check(tmp_path, case, change)


def test_zero_points_off_by_one_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = quantized_formats.PackQuantizedReader
    right = reader.zeros
    monkeypatch.setattr(reader, "zeros", lambda self, *part: right(self, *part) ^ np.uint8(1))
    for case in ("pack-4-group-asym", "pack-8-channel-asym", "pack-4-act-order"):
        with pytest.raises(AssertionError, match="k_proj"):
            check(tmp_path / case, case)
