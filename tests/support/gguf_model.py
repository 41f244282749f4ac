"""GGUF files of a small model, written with the gguf package's own writer, and their weights as they are loaded."""

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from jax.sharding import Mesh

from octavo.models.architectures import get_architecture
from octavo.models.loading.loader import load_params, resolve_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 48
METADATA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
MATRICES = {
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
}
NORMS = {"output_norm": HIDDEN, "blk.0.attn_norm": HIDDEN, "blk.0.ffn_norm": HIDDEN}


def rope_pairs_adjacent(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's q and k: row i and i + half of a head become neighbours."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def make_weights(architecture: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """Float weights under GGUF names, in Hugging Face's order of rows."""
    rng = np.random.default_rng(seed)
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in MATRICES.items()}
    weights |= {f"{name}.weight": rng.standard_normal(size, np.float32) for name, size in NORMS.items()}
    if architecture == "qwen2":
        for name in ("q", "k", "v"):
            rows = len(weights[f"blk.0.attn_{name}.weight"])
            weights[f"blk.0.attn_{name}.bias"] = rng.standard_normal(rows, np.float32)
    if architecture == "qwen3":
        weights |= {f"blk.0.attn_{n}_norm.weight": rng.standard_normal(HEAD_DIM, np.float32) for n in "qk"}
    return weights


def write(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", kind: Kind = Kind.F32, **changes: Any
) -> Path:
    """Matrices stored as ``kind``, vectors as float32; ``changes`` go over METADATA (dots as double underscores)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**METADATA, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(full, value)
    for name, value in weights.items():
        stored = value
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name.rpartition(".")[0])
        if architecture == "llama" and heads:
            stored = rope_pairs_adjacent(stored, heads)
        if stored.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, stored)
        elif kind == Kind.F16:
            writer.add_tensor(name, stored.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype: Any = jnp.float32, quantization: str | None = None) -> dict[str, Any]:
    model = resolve_model(str(path), quantization=quantization)
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, config, dtype=dtype, mesh=mesh, load_format=model.format)


def linears(params: dict[str, Any]) -> dict[str, Any]:
    layer = params["layers"][0]
    pairs = [("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down")]
    return {name: layer[block][name]["weight"] for block, name in pairs}
