"""A layer quantised in every way, over 2, 4 and 8 virtual CPU devices, in a process of its own: their number is fixed
early.

8 devices have 16 columns each of attention's output and 48 of the feed-forward's, so groups of 32, 40, 64 and 128
columns are cut by the borders between devices; and 2 KV heads are copied to 4 and to 8. Prints one JSON record a case
and number of devices: linears whose weights, put together from the devices' shares, are not exactly the plain ones; how
many arrays are shared out; and the largest error of the products that the devices compute together.
"""

import faulthandler
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quantized_gguf import write_gguf
from quantized_model import CASES, write_quantized
from safetensors.numpy import load_file, save_file

from octavo.engine.launch import make_cpu_devices, make_mesh
from octavo.models.architectures import get_architecture
from octavo.models.layers.linear import _float8_product, matmul
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.loading.quantized_source import QuantizedSource
from octavo.models.quantization.packing import WORD_BITS
from octavo.models.quantization.weights import Float8Weight, IntWeight, PartedWeight
from octavo.models.sharding import split_over

LIMIT_S = 250.0
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
GGUF_KINDS = {"gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0", "gguf-q4_1": "Q4_1"}
ONLINE = {"online-fp8": "fp8", "online-int8": "int8", "online-int4": "int4"}
NAMES = (*CASES, *GGUF_KINDS, *ONLINE)
MUTATED = ("awq-32", "gptq-4-act", "fp8-blocks-128", "gguf-q4_1", "online-int8")
"""Run once more with the mutation, on 2 devices."""
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Rows = tuple[int, ...]
read_rows = QuantizedSource.read_rows


def load(folder: Path, devices: int, quantization: str | None = None) -> tuple[dict[str, Any], dict[str, Rows]]:
    """The linears of the only layer, and the rows of their parts as the devices have them."""
    model = resolve_model(str(folder), quantization=quantization)
    architecture = get_architecture(model.config.architecture)
    config = split_over(architecture.decoder_config(model.config), devices)
    mesh = make_mesh(devices)
    params = load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)
    attention, mlp = params["layers"][0]["attention"], params["layers"][0]["mlp"]
    found = {"qkv": attention["qkv"], "o": attention["o"], "gate_up": mlp["gate_up"], "down": mlp["down"]}
    rows = {
        "qkv": (config.q_size, config.kv_size, config.kv_size),
        "o": (config.hidden_size,),
        "gate_up": (config.intermediate_size,) * 2,
        "down": (config.hidden_size,),
    }
    return {name: linear["weight"] for name, linear in found.items()}, rows


def plain(weight: Any) -> np.ndarray:
    """f32 ``[out, in]``, columns in the model's order: by NumPy, from the description of the fields."""
    if isinstance(weight, PartedWeight):
        return np.concatenate([plain(part) for part in weight.parts])
    if not isinstance(weight, IntWeight | Float8Weight):
        return np.asarray(weight)
    scale = np.repeat(np.asarray(weight.scale, np.float32), weight.group_size, axis=1)
    if isinstance(weight, Float8Weight):
        return np.asarray(weight.weight).astype(np.float32) * scale
    low = np.arange(WORD_BITS - weight.bits, -1, -weight.bits, dtype=np.int32)
    words = np.asarray(weight.packed)
    codes = (words[..., None] << low >> (WORD_BITS - weight.bits)).reshape(len(words), -1)
    if weight.zero is not None:
        codes = codes - np.repeat(np.asarray(weight.zero, np.int32), weight.group_size, axis=1)
    values = codes.astype(np.float32) * scale
    if weight.minimum is not None:
        counted = (codes + (1 << (weight.bits - 1))).astype(np.float32)
        values = counted * scale + np.repeat(np.asarray(weight.minimum), weight.group_size, axis=1)
    if weight.permutation is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, np.asarray(weight.permutation)] = values
    return ordered


def parts_of(fused: np.ndarray, rows: Rows, devices: int) -> list[np.ndarray]:
    """Rows that lie device by device, by part."""
    shares = fused.reshape(devices, -1, fused.shape[1])
    ends = np.cumsum([size // devices for size in rows])[:-1]
    return [part.reshape(-1, fused.shape[1]) for part in np.split(shares, ends, axis=1)]


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def products(inputs: dict[str, jax.Array], weights: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: matmul(inputs[name], weight) for name, weight in weights.items()}


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def float8_products(inputs: dict[str, jax.Array], weights: dict[str, Any]) -> dict[str, jax.Array]:
    """With activations rounded to float8, as GPUs compute; their scales are of whole rows, which devices share."""
    return {name: _float8_product(inputs[name], weight, jnp.dtype(jnp.float32)) for name, weight in weights.items()}


def multiplied(weights: dict[str, Any], devices: int) -> tuple[dict[str, np.ndarray], ...]:
    """Inputs; their products; and those of o and down with rounded activations, where the format rounds them."""
    rng = np.random.default_rng(3)
    inputs = {name: rng.standard_normal((5, weight.shape[1])).astype(np.float32) for name, weight in weights.items()}
    cut, mesh = {"o": P(None, "tp"), "down": P(None, "tp")}, make_mesh(devices)
    placed = {name: jax.device_put(x, NamedSharding(mesh, cut.get(name, P()))) for name, x in inputs.items()}
    rounded = {
        name: weights[name] for name in cut if getattr(weights[name], "activations", "none") in ("token", "static")
    }
    done = products(placed, weights), float8_products({name: placed[name] for name in rounded}, rounded)
    return inputs, *jax.tree.map(np.asarray, jax.block_until_ready(done))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)))


def compare(checkpoint: Path, reference: Path, devices: int, quantization: str | None) -> dict[str, Any]:
    plain_weights, rows = load(reference, devices)
    weights, _ = load(checkpoint, devices, quantization)
    expected, wrong, split = {name: plain(weight) for name, weight in plain_weights.items()}, [], 0
    for name, weight in weights.items():
        found = plain(weight)
        if isinstance(weight, PartedWeight):
            expected[name] = np.concatenate(parts_of(expected[name], rows[name], devices))
        wrong += [] if np.array_equal(found, expected[name]) else [name]
        leaves = jax.tree.leaves(weight)
        split += sum(leaf.addressable_shards[0].data.nbytes < leaf.nbytes for leaf in leaves)
    inputs, products, rounded = multiplied(weights, devices)
    _, _, alone = multiplied(load(checkpoint, 1, quantization)[0], 1) if rounded else (None, None, {})
    return {
        "wrong": wrong,
        "split": split,
        "error": max(error(products[name], inputs[name] @ expected[name].T) for name in expected),
        "float8_error": max((error(rounded[name], alone[name]) for name in alone), default=0.0),
    }


def write(folder: Path, name: str) -> tuple[Path, Path, str | None]:
    """A checkpoint, the plain one that it stands for, and what is asked of ``--quantization``."""
    if name in CASES:
        write_quantized(folder, CASES[name], **SIZES)
        return folder / "quantized", folder / "plain", None
    if name in GGUF_KINDS:
        write_gguf(folder, GGUF_KINDS[name], **SIZES)
        return folder, folder, "gguf"
    write_quantized(folder, CASES["awq-32"], **SIZES)
    return folder / "plain", as_quantized_on_one_device(folder, ONLINE[name]), ONLINE[name]


def as_quantized_on_one_device(folder: Path, method: str) -> Path:
    """``folder/plain`` with the weights that ``method`` makes of them."""
    tensors = load_file(folder / "plain" / "model.safetensors")
    weights, rows = load(folder / "plain", 1, method)
    for name, weight in weights.items():
        for module, part in zip(PARTS[name], parts_of(plain(weight), rows[name], 1), strict=True):
            tensors[f"model.layers.0.{module}.weight"] = np.ascontiguousarray(part)
    place = folder / "rounded"
    place.mkdir()
    shutil.copy(folder / "plain" / "config.json", place)
    save_file(tensors, place / "model.safetensors")
    return place


def run(folder: Path, name: str, counts: tuple[int, ...]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    print(f"running {name}", file=sys.stderr, flush=True)
    checkpoint, reference, quantization = write(folder / name, name)
    for devices in counts:
        record = compare(checkpoint, reference, devices, quantization)
        print(json.dumps({"case": name, "devices": devices, **record}), flush=True)


def first_columns(self: Any, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None = None) -> None:
    """Every device has the first one's columns of a field: the mutation."""
    if name in self._fields and columns is not None:
        columns = slice(0, columns.stop - columns.start)
    read_rows(self, name, start, stop, out, columns)


def main() -> None:
    make_cpu_devices(8)
    with tempfile.TemporaryDirectory() as place:
        for name in NAMES:
            run(Path(place), name, (2, 4, 8))
        QuantizedSource.read_rows = first_columns
        for name in MUTATED:
            run(Path(place) / "mutated", name, (2,))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
