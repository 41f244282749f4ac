"""Rounded weights as the tensors, and the ``quantization_config``, of a checkpoint. No jax here.

What ``models.loading.quantized_formats`` and ``quantized_float`` read. Layouts: AutoAWQ's GEMM version, AutoGPTQ
(checkpoint format gptq), compressed-tensors (float-quantized).
"""

from typing import Any

import numpy as np

from .packing import pack, pack_awq
from .rounding import IntegerGrid, Rounded

Tensors = dict[str, np.ndarray]
"""By suffix: ``qweight``, ``weight_scale``, …"""


def awq_tensors(rounded: Rounded) -> Tensors:
    """``qweight [in, out / 8]``, ``qzeros [groups, out / 8]``, ``scales f16 [groups, out]``."""
    return {
        "qweight": pack_awq(np.ascontiguousarray(rounded.codes.T)),
        "qzeros": pack_awq(np.ascontiguousarray(rounded.zeros.T)),
        "scales": np.ascontiguousarray(rounded.scales.T.astype(np.float16)),
    }


def awq_config(grid: IntegerGrid) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": grid.bits,
        "group_size": grid.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }


def gptq_tensors(rounded: Rounded, bits: int) -> Tensors:
    """``qweight [in * bits / 32, out]``, ``qzeros [groups, out * bits / 32]`` less one, ``scales f16 [groups, out]``,
    ``g_idx [in]``. Zero points must not be 0."""
    in_size = rounded.codes.shape[1]
    size = in_size // rounded.scales.shape[1]
    return {
        "qweight": np.ascontiguousarray(pack(rounded.codes, bits).T),
        "qzeros": pack(np.ascontiguousarray(rounded.zeros.T - np.uint8(1)), bits),
        "scales": np.ascontiguousarray(rounded.scales.T.astype(np.float16)),
        "g_idx": (np.arange(in_size) // size).astype(np.int32),
    }


def gptq_config(grid: IntegerGrid, damping: float, version: str) -> dict[str, Any]:
    """``version`` is Octavo's."""
    return {
        "quant_method": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size or -1,
        "sym": grid.symmetric,
        "desc_act": False,
        "damp_percent": damping,
        "true_sequential": False,
        "lm_head": False,
        "pack_dtype": "int32",
        "checkpoint_format": "gptq",
        "meta": {"quantizer": [f"octavo:{version}"]},
    }


def float8_tensors(codes: np.ndarray, scales: np.ndarray) -> Tensors:
    """``weight`` e4m3 ``[out, in]``, ``weight_scale f32 [out, 1]`` or ``[1]``."""
    return {"weight": codes, "weight_scale": scales}


def float8_config(*, per_channel: bool) -> dict[str, Any]:
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**float8, "strategy": "channel" if per_channel else "tensor", "dynamic": False}
    inputs = {**float8, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
