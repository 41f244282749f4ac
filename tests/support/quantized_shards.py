"""Quantised checkpoints over 2 and 4 virtual CPU devices, in a process of its own: their number is fixed early.

Prints one JSON record a case: whether every weight, put together from the devices' shares, is the plain checkpoint's.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from quantized_model import CASES, write_quantized

from octavo.models.architectures import get_architecture
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.quantization.weights import IntWeight, PartedWeight, dequantize
from octavo.models.sharding import split_over


def load(folder: Path, devices: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The linears of the only layer, and the rows of q, k and v."""
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    config = split_over(architecture.decoder_config(model.config), devices)
    params = load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)
    layer = params["layers"][0]
    pairs = [("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down")]
    return {name: layer[block][name]["weight"] for block, name in pairs}, (config.q_size,) + (config.kv_size,) * 2


def plain(weight: Any) -> np.ndarray:
    if isinstance(weight, jax.Array):
        return np.asarray(weight)
    whole = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), weight)
    values = np.asarray(dequantize(whole, jnp.float32))
    if isinstance(weight, IntWeight) and weight.permutation is not None:
        ordered = np.empty_like(values)
        ordered[:, np.asarray(weight.permutation)] = values
        return ordered
    return values


def parts_of(fused: np.ndarray, sizes: tuple[int, ...], devices: int) -> list[np.ndarray]:
    """Rows that lie device by device, by part."""
    shares = fused.reshape(devices, -1, fused.shape[1])
    ends = np.cumsum([size // devices for size in sizes])[:-1]
    return [part.reshape(-1, fused.shape[1]) for part in np.split(shares, ends, axis=1)]


def compare(folder: Path, devices: int) -> dict[str, Any]:
    expected, sizes = load(folder / "plain", devices)
    found, _ = load(folder / "quantized", devices)
    wrong, split = [], 0
    for name, weight in found.items():
        if isinstance(weight, PartedWeight):
            rows = sizes if name == "qkv" else (expected[name].shape[0] // 2,) * 2
            pairs = zip(weight.parts, parts_of(plain(expected[name]), rows, devices), strict=True)
            same = all(np.array_equal(plain(part), rows) for part, rows in pairs)
        else:
            same = np.array_equal(plain(weight), plain(expected[name]))
        wrong += [] if same else [name]
        leaves = jax.tree.leaves(weight)
        split += sum(leaf.addressable_shards[0].data.nbytes < leaf.nbytes for leaf in leaves)
    return {"wrong": wrong, "split": split}


def main(names: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            folder = write_quantized(Path(place) / name, CASES[name])
            for devices in (2, 4):
                print(json.dumps({"case": name, "devices": devices, **compare(folder, devices)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
