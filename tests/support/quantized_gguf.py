"""A small Llama as a GGUF file, its matrices in one of ggml's types, by the gguf package's own writer."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from quantized_model import CONFIG
from tiny_model import _tensors

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, kind: str, **changes: Any) -> Path:
    """``folder/model.gguf``. The linears are of ``kind`` (Q8_0, Q4_0, Q4_1), all others float32."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    rng = np.random.default_rng(11)
    for name, value in _tensors(config, lambda *shape: (rng.standard_normal(shape) * 0.25).astype(np.float32)).items():
        stored = _gguf_name(name.removesuffix(".weight"))
        if "_proj" in name:
            heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(stored.rpartition("attn_")[2])
            rows = _neighbours(value, config[heads]) if heads else value
            of_kind = GGMLQuantizationType[kind]
            writer.add_tensor(f"{stored}.weight", quantize(rows, of_kind), raw_dtype=of_kind)
        else:
            writer.add_tensor(f"{stored}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}"


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head beside one another, as llama.cpp rotates them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
