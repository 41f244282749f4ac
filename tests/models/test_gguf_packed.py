"""GGUF weights that stay packed are those that the gguf package reads from the same file, exactly."""

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_model import KV_HEADS, linears, load, make_weights, write

from octavo.models.loading import quantized_formats
from octavo.models.quantization.weights import dequantize, unpack_codes

MATRICES = {"o": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",)}


def read_by_the_package(path: Path) -> dict[str, np.ndarray]:
    """f32 [out, in] of the file's own blocks. Rows of Llama's q and k are in another order there, so those are not."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def values(name: str) -> np.ndarray:
        tensor = tensors[f"blk.0.{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    return {linear: np.concatenate([values(name) for name in names]) for linear, names in MATRICES.items()}


def check(path: Path) -> dict[str, Any]:
    found, expected = linears(load(path, quantization="gguf")), read_by_the_package(path)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(dequantize(found[name], jnp.float32)), values, err_msg=name)
    return found


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_packed_weights(tmp_path: Path, kind: Kind) -> None:
    """Lowest and highest codes included."""
    found = check(write(tmp_path / "model.gguf", make_weights(), kind=kind))
    codes = np.asarray(unpack_codes(found["down"].packed, found["down"].bits))
    assert (codes.min(), codes.max()) == ((-127, 127) if kind == Kind.Q8_0 else (-8, 7))
    assert (found["down"].minimum is not None) == (kind == Kind.Q4_1)
    assert found["qkv"].shape[0] == 256 + 2 * 64 * KV_HEADS


def halves_by_turns(blocks: np.ndarray) -> np.ndarray:
    """As if the first two codes were in the first byte."""
    stored = blocks[..., -16:]
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(blocks), -1)


def upper_half_first(blocks: np.ndarray) -> np.ndarray:
    stored = blocks[..., -16:]
    return np.concatenate([stored >> 4, stored & 15], axis=-1).reshape(len(blocks), -1)


def off_by_one(blocks: np.ndarray) -> np.ndarray:
    stored = blocks[..., -16:]
    return np.concatenate([stored & 15, stored >> 4], axis=-1).reshape(len(blocks), -1) ^ np.uint8(1)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("wrong", [halves_by_turns, upper_half_first, off_by_one])
def test_another_layout_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, wrong: Any) -> None:
    path = write(tmp_path / "model.gguf", make_weights(), kind=kind)
    reader = quantized_formats.GgufReader

    def codes(self: Any, start: int, stop: int, columns: Any) -> np.ndarray:
        return wrong(self._blocks(start, stop))[:, columns]

    monkeypatch.setattr(reader, "codes", codes)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(path)
