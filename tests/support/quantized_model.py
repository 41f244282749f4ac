"""Small quantised checkpoints, packed bit by bit as the descriptions of their formats say, and the plain weights that
they stand for. Nothing here is shared with the package."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny_model import BASE, _tensors, write_checkpoint

CONFIG = {
    **BASE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds this column of its eight."""
F8 = ml_dtypes.float8_e4m3fn
Packed = tuple[dict[str, np.ndarray], np.ndarray]
"""The tensors of one weight by their suffix, and the plain weight f32 [out, in]."""


@dataclass(frozen=True)
class Case:
    """One format: its configuration and how it stores a weight f32 [out, in]."""

    quantization: dict[str, Any]
    store: Callable[[np.ndarray], Packed]
    skipped: tuple[str, ...] = field(default=())
    """Linears that stay plain."""


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers [rows, n] → i32 [rows, n * bits / 32]: a row's values one after another, lowest bit first."""
    packed = np.zeros((len(values), values.shape[1] * bits // 32), np.uint32)
    for column in range(values.shape[1]):
        source = column if order is None else column // 8 * 8 + order[column % 8]
        for bit in range(bits):
            place = column * bits + bit
            digit = (values[:, source].astype(np.int64) >> bit & 1).astype(np.uint32)
            packed[:, place // 32] |= digit << np.uint32(place % 32)
    return packed.view(np.int32)


def integers(
    weight: np.ndarray, bits: int, group: int, *, symmetric: bool = False, lowest: int = 0, order: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], scales f16 and zero points [out, groups], all counted from 0, and the plain weight.

    ``lowest`` and the highest zero point both occur. ``order``: the group of each column.
    """
    out_size, in_size = weight.shape
    groups = np.arange(in_size) // group if order is None else order
    count, top = groups.max() + 1, (1 << bits) - 1
    codes, plain = np.zeros(weight.shape, np.int64), np.zeros(weight.shape, np.float32)
    scales, zeros = np.zeros((out_size, count), np.float16), np.zeros((out_size, count), np.int64)
    for g in range(count):
        part = weight[:, groups == g]
        span = part.max(1) - part.min(1)
        scales[:, g] = (2 * np.abs(part).max(1) / top if symmetric else span / top).astype(np.float16)
        step = scales[:, g].astype(np.float32)
        zeros[:, g] = 1 << (bits - 1) if symmetric else np.clip(np.rint(-part.min(1) / step), lowest, top)
        if not symmetric:
            zeros[0, g], zeros[1, g] = lowest, top
        found = np.clip(np.rint(part / step[:, None]) + zeros[:, g, None], 0, top).astype(np.int64)
        codes[:, groups == g] = found
        plain[:, groups == g] = (found - zeros[:, g, None]).astype(np.float32) * step[:, None]
    return codes, scales, zeros, plain


def awq(group: int) -> Case:
    """``group`` -1: one for the whole row."""

    def store(weight: np.ndarray) -> Packed:
        codes, scales, zeros, plain = integers(weight, 4, weight.shape[1] if group == -1 else group)
        return {
            "qweight": words(codes.T, 4, AWQ_NIBBLES),
            "qzeros": words(zeros.T, 4, AWQ_NIBBLES),
            "scales": np.ascontiguousarray(scales.T),
        }, plain

    about = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Case(about, store)


def gptq(bits: int, group: int, *, sym: bool = False, v2: bool = False, desc_act: bool = False) -> Case:
    def store(weight: np.ndarray) -> Packed:
        out_size, in_size = weight.shape
        index = np.arange(in_size) // group
        if desc_act:
            index = np.random.default_rng(out_size).permutation(index)
        lowest = 0 if v2 else 1
        codes, scales, zeros, plain = integers(weight, bits, group, symmetric=sym, lowest=lowest, order=index)
        stored = zeros if v2 else zeros - 1
        return {
            "qweight": np.ascontiguousarray(words(codes, bits).T),
            "qzeros": words(stored.T, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": index.astype(np.int32),
        }, plain

    about = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return Case({**about, "checkpoint_format": "gptq_v2" if v2 else "gptq"}, store)


def float8(weight: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes for scales that broadcast, and the plain weight."""
    codes = (weight / scale).astype(F8)
    return codes, codes.astype(np.float32) * scale.astype(np.float32)


def fp8(*, static: bool = False) -> Case:
    def store(weight: np.ndarray) -> Packed:
        scale = np.array(np.abs(weight).max() / 448 * (1 + len(weight) / 64), np.float32)
        codes, plain = float8(weight, scale)
        inputs = {"input_scale": np.array(0.01 * len(weight), np.float32)} if static else {}
        return {"weight": codes, "weight_scale": scale, **inputs}, plain

    scheme = "static" if static else "dynamic"
    return Case({"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}, store)


def fp8_blocks(block: int) -> Case:
    def store(weight: np.ndarray) -> Packed:
        rows, columns = (-(-size // block) for size in weight.shape)
        scale = np.random.default_rng(rows).uniform(0.003, 0.009, (rows, columns)).astype(np.float32)
        wide = np.repeat(np.repeat(scale, block, 0), block, 1)[: weight.shape[0], : weight.shape[1]]
        codes, plain = float8(weight, wide)
        return {"weight": codes, "weight_scale_inv": scale}, plain

    return Case({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}, store)


def fbgemm() -> Case:
    def store(weight: np.ndarray) -> Packed:
        scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
        codes, plain = float8(weight, scale)
        return {"weight": codes, "weight_scale": scale}, plain

    return Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["o_proj"]},
        store,
        skipped=("o_proj",),
    )


def _compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": more.pop("inputs", None)}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def pack_quantized(bits: int, group: int, *, symmetric: bool, actorder: bool = False) -> Case:
    def store(weight: np.ndarray) -> Packed:
        index = np.arange(weight.shape[1]) // group
        if actorder:
            index = np.random.default_rng(len(weight)).permutation(index)
        codes, scales, zeros, plain = integers(weight, bits, group, symmetric=symmetric, order=index)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
        if actorder:
            tensors["weight_g_idx"] = index.astype(np.int32)
        return tensors, plain

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    weights |= {"actorder": "group"} if actorder else {}
    return Case(_compressed("pack-quantized", weights), store)


def int_quantized() -> Case:
    def store(weight: np.ndarray) -> Packed:
        codes, scales, _, plain = integers(weight, 8, weight.shape[1], symmetric=True)
        return {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}, plain

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return Case(
        _compressed("int-quantized", weights, inputs=inputs, ignore=["lm_head", "re:.*v_proj"]), store, ("v_proj",)
    )


def float_quantized() -> Case:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return Case(_compressed("float-quantized", weights, inputs=inputs), fp8(static=True).store)


def float_channels() -> Case:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return Case(_compressed("float-quantized", weights, inputs=inputs), fbgemm().store)


CASES: dict[str, Case] = {
    "awq-32": awq(32),
    "awq-column": awq(-1),
    "gptq-2": gptq(2, 32),
    "gptq-3": gptq(3, 32),
    "gptq-4": gptq(4, 32),
    "gptq-4-ragged": gptq(4, 64),
    "gptq-8": gptq(8, 32),
    "gptq-4-sym": gptq(4, 32, sym=True),
    "gptq-8-sym": gptq(8, 32, sym=True),
    "gptq-3-sym-v2": gptq(3, 32, sym=True, v2=True),
    "gptq-4-v2": gptq(4, 32, v2=True),
    "gptq-4-act": gptq(4, 32, desc_act=True),
    "gptq-4-act-sym-v2": gptq(4, 32, sym=True, v2=True, desc_act=True),
    "fp8": fp8(),
    "fp8-static": fp8(static=True),
    "fp8-blocks": fp8_blocks(32),
    "fp8-blocks-ragged": fp8_blocks(40),
    "fp8-blocks-128": fp8_blocks(128),
    "fbgemm": fbgemm(),
    "ct-pack-4": pack_quantized(4, 32, symmetric=True),
    "ct-pack-4-asym": pack_quantized(4, 32, symmetric=False),
    "ct-pack-4-act": pack_quantized(4, 32, symmetric=True, actorder=True),
    "ct-pack-8": pack_quantized(8, 32, symmetric=True),
    "ct-int": int_quantized(),
    "ct-float-static": float_quantized(),
    "ct-float-channel": float_channels(),
}


def write_quantized(folder: Path, case: Case, **changes: Any) -> Path:
    """``folder/quantized`` and ``folder/plain``, the same model with the weights that the codes stand for."""
    config = {**CONFIG, **changes}
    rng = np.random.default_rng(11)
    tensors = _tensors(config, lambda *shape: (rng.standard_normal(shape) * 0.25).astype(np.float32))
    plain, stored = {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        linear = module.rpartition(".")[2]
        if linear not in LINEARS or linear in case.skipped:
            plain[name] = stored[name] = value
            continue
        packed, plain[name] = case.store(value)
        stored |= {f"{module}.{suffix}": np.ascontiguousarray(array) for suffix, array in packed.items()}
    write_checkpoint(folder / "plain", config, plain)
    write_stored(folder / "quantized", {**config, "quantization_config": case.quantization}, stored)
    return folder


def write_stored(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """NumPy arrays of no axis lose it in ``np.ascontiguousarray``: single numbers have the shape [1] or [] by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
