"""Small checkpoints made on the spot: a random Llama whose KV cache matters, and one whose text is known in advance."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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


PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri"
    " ro ic ne ea ra"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def add_tokenizer(folder: Path) -> Path:
    """Gives ``tiny_model`` text: ids 0..2 are <unk>, <s> and </s>, then the 256 bytes, then 41 pairs of letters.

    A text begins with <s>. The generation config has defaults for sampling, so that a test can see them used.
    """
    vocab = {token: token_id for token_id, token in enumerate(("<unk>", "<s>", "</s>"))}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    merges = [(pair[0], pair[1]) for pair in PAIRS.split()]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.8, "top_k": 40}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder
