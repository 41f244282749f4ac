"""Small checkpoints made on the spot: a random Llama whose KV cache matters, and one whose text is known in advance."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(config: dict, draw) -> dict[str, np.ndarray]:
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    tensors = {
        "model.embed_tokens.weight": draw(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": draw(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    return tensors


def tiny_model(folder: Path, **changes) -> Path:
    """Two layers, grouped queries 4:2, random weights large enough to keep the best logits apart."""
    config = {
        **BASE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        **changes,
    }
    rng = np.random.default_rng(7)

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.25).astype(np.float32)

    return write_checkpoint(folder, config, _tensors(config, draw))


def permutation_model(folder: Path, permutation: np.ndarray, **changes) -> Path:
    """Greedy text follows ``permutation``: token t is followed by permutation[t]. Ignores its KV cache."""
    vocab = len(permutation)
    config = {
        **BASE,
        "hidden_size": vocab,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": vocab,
        **changes,
    }
    tensors = _tensors(config, lambda *shape: np.zeros(shape, np.float32))
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    head = np.zeros((vocab, vocab), np.float32)
    head[permutation, np.arange(vocab)] = 4.0
    tensors["lm_head.weight"] = head
    return write_checkpoint(folder, config, tensors)
