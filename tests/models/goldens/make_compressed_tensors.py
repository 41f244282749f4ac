"""Quantised weights as the compressed-tensors library stores them, for tests/models/test_compressed_tensors.py.

Run in an environment of its own with torch, transformers and compressed-tensors: ``python make_compressed_tensors.py
[CASE ...]``. For each case the library quantises and compresses two linear layers of a small model, writes their
configuration as it writes it into config.json, and decompresses them again. ``compressed_tensors/CASE.npz`` has

- ``config``: the configuration as JSON, and ``versions``;
- ``stored/MODULE.TENSOR``: what a checkpoint holds, types that NumPy lacks as integers; all in ``dtypes``, JSON;
- ``plain/MODULE``: f32 [out, in], what the library decompresses that to.

``pack-4-act-order`` takes a release before 0.20, in which the library left it off; the others take the current one.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors import __version__
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams

HERE = Path(__file__).resolve().parent / "compressed_tensors"
SHAPES = {"model.layers.0.self_attn.k_proj": (32, 64), "model.layers.0.mlp.down_proj": (64, 96)}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor"}
GROUP = {"strategy": "group", "group_size": 32}
CHANNEL = {"strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float"}
Weights = dict[str, Any]


def group(weights: Weights, inputs: Weights | None = None, targets: str = "Linear") -> dict[str, Any]:
    return {"targets": [targets], "weights": weights, "input_activations": inputs}


INT8_TOKENS = {**TOKENS, "type": "int"}
CASES: dict[str, list[dict[str, Any]]] = {
    "pack-4-group": [group({"num_bits": 4, "symmetric": True, **GROUP})],
    "pack-4-group-asym": [group({"num_bits": 4, "symmetric": False, **GROUP})],
    "pack-4-channel-asym": [group({"num_bits": 4, "symmetric": False, **CHANNEL})],
    "pack-4-act-order": [group({"num_bits": 4, "symmetric": False, "actorder": "group", **GROUP})],
    "pack-4-act-order-weight": [group({"num_bits": 4, "symmetric": True, "actorder": "weight", **GROUP})],
    "pack-8-group": [group({"num_bits": 8, "symmetric": True, **GROUP})],
    "pack-8-channel-asym": [group({"num_bits": 8, "symmetric": False, **CHANNEL})],
    "pack-4-and-8": [
        group({"num_bits": 8, "symmetric": True, **CHANNEL}, targets="re:.*self_attn.*"),
        group({"num_bits": 4, "symmetric": True, **GROUP}),
    ],
    "int-8-channel": [group({"num_bits": 8, "symmetric": True, **CHANNEL}, INT8_TOKENS)],
    "int-8-channel-asym": [group({"num_bits": 8, "symmetric": False, **CHANNEL}, INT8_TOKENS)],
    "int-8-tensor": [group({"num_bits": 8, "symmetric": True, "strategy": "tensor"}, INT8_TOKENS)],
    "float-8-tensor-static": [group({**FLOAT, "strategy": "tensor"}, STATIC)],
    "float-8-channel": [group({**FLOAT, **CHANNEL}, TOKENS)],
    "float-8-weights-only": [group({**FLOAT, **CHANNEL})],
    "float-8-block": [group({**FLOAT, "strategy": "block", "block_structure": [32, 40]}, TOKENS)],
}
FORMATS = {"pack": "pack-quantized", "int": "int-quantized", "float": "float-quantized"}


def draw(case: str, module: str, dtype: torch.dtype) -> torch.Tensor:
    """A weight: rows 0 and 1 of one sign each, so that zero points are at both ends."""
    rng = np.random.default_rng(zlib.crc32(f"{case}/{module}".encode()))
    values = (rng.standard_normal(SHAPES[module]) * 0.25).astype(np.float32)
    values[0], values[1] = np.abs(values[0]), -np.abs(values[1])
    return torch.from_numpy(values).to(dtype)


def ranges(weight: torch.Tensor, args: Any, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest of what shares a scale, in the shape of the scales."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        parts, shape = [weight], (1,)
    elif args.strategy == "channel":
        parts, shape = list(weight), (rows, 1)
    elif args.strategy == "group":
        order = torch.arange(columns) // args.group_size if order is None else order
        count = columns // args.group_size
        parts, shape = [row[order == index] for row in weight for index in range(count)], (rows, count)
    else:
        high, wide = args.block_structure
        tiles = [[weight[y : y + high, x : x + wide] for x in range(0, columns, wide)] for y in range(0, rows, high)]
        parts, shape = [tile for line in tiles for tile in line], (len(tiles), len(tiles[0]))
    low, high_end = ([getattr(part, name)() for part in parts] for name in ("min", "max"))
    return torch.stack(low).reshape(shape), torch.stack(high_end).reshape(shape)


def build(case: str) -> torch.nn.Module:
    """The model with weights that are not quantised yet, their scales and their zero points."""
    # As checkpoints have them, and in one case as accurate as can be.
    dtype = torch.float32 if case == "pack-4-group-asym" else torch.bfloat16
    model = torch.nn.Module()
    for name, (rows, columns) in SHAPES.items():
        parent = model
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        linear = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
        linear.weight.data = draw(case, name, dtype)
        parent.add_module(name.rpartition(".")[2], linear)
    groups = {f"group_{index}": QuantizationScheme(**scheme) for index, scheme in enumerate(CASES[case])}
    form = FORMATS[case.split("-")[0]]
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, format=form, ignore=["lm_head"]))
    for name in SHAPES:
        fill(model.get_submodule(name), name, case)
    return model


def fill(module: Any, name: str, case: str) -> None:
    args, order = module.quantization_scheme.weights, None
    if hasattr(module, "weight_g_idx"):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        in_order = torch.arange(module.weight.shape[1]) // args.group_size
        order = in_order[torch.from_numpy(rng.permutation(len(in_order)))].to(torch.int32)
        module.weight_g_idx.data = order
    scale, zero = calculate_qparams(*ranges(module.weight.data, args, order), args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data = torch.full_like(module.input_scale.data, 0.0625)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Numbers of a type that NumPy lacks as integers of as many bits."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8)
        return bits.numpy()
    return tensor.numpy()


def make(case: str) -> None:
    model = build(case)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = tensors_of(model)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text("{}", encoding="utf-8")
        compressor.update_config(folder)
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["quantization_config"]
    compressor.decompress_model(model)
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in stored.items()}
    plain = {name: model.get_submodule(name).weight.detach().float().numpy() for name in SHAPES}
    np.savez_compressed(
        HERE / f"{case}.npz",
        config=np.array(json.dumps(config)),
        versions=np.array(f"compressed-tensors {__version__}, torch {torch.__version__}, numpy {np.__version__}"),
        dtypes=np.array(json.dumps(types)),
        **{f"stored/{name}": to_numpy(tensor) for name, tensor in stored.items()},
        **{f"plain/{name}": values for name, values in plain.items()},
    )
    print(f"{case}: {config['format']}, {', '.join(name.removeprefix('model.layers.0.') for name in stored)}")


def main(cases: list[str]) -> None:
    HERE.mkdir(exist_ok=True)
    for case in cases or [case for case in CASES if case != "pack-4-act-order"]:
        make(case)


if __name__ == "__main__":
    main(sys.argv[1:])
