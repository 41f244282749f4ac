"""GGUF metadata -> the ``config.json`` that Hugging Face would have for the same model."""

from math import log, pi
from typing import Any

import numpy as np
from gguf.quants import dequantize

from .errors import LoadError
from .gguf_file import GGUFFile

# Mistral's GGUF files say "llama".
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Keys that change the arithmetic, with the values under which they change nothing.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "attention.causal": (True,),
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """A dict as ``config.json`` holds it, with ``rope_parameters`` in transformers 5's form.

    Raises LoadError for an architecture, a rope kind or an option that is not served.
    """
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise LoadError("GGUF architecture", file=file.path, expected=" or ".join(_ARCHITECTURES), found=repr(name))
    architecture, model_type = _ARCHITECTURES[name]
    keys = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in keys and keys[key] not in neutral:
            raise LoadError(f"{name}.{key} = {keys[key]} is not supported", file=file.path)
    num_heads = _one(file, keys, "attention.head_count")
    num_kv_heads = _one(file, keys, "attention.head_count_kv") if "attention.head_count_kv" in keys else num_heads
    hidden_size = _required(file, keys, "embedding_length")
    head_dim = _head_dim(file, keys, hidden_size, num_heads)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError("the tensor is missing", file=file.path, tensor="token_embd.weight")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _one(file, keys, "feed_forward_length"),
        "num_hidden_layers": _required(file, keys, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _required(file, keys, "context_length"),
        "rms_norm_eps": _required(file, keys, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(metadata),
    }
    if name == "llama":
        # Only Llama's configuration has these; Qwen's biases follow from the architecture.
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if window := keys.get("attention.sliding_window"):
        if name != "llama":
            raise LoadError(f"{name}.attention.sliding_window = {window} is not supported", file=file.path)
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _required(file: GGUFFile, keys: dict[str, Any], key: str) -> Any:
    if key not in keys:
        raise LoadError(f"metadata key {file.metadata['general.architecture']}.{key} is missing", file=file.path)
    return keys[key]


def _one(file: GGUFFile, keys: dict[str, Any], key: str) -> int:
    """A number that some files give per layer."""
    value = _required(file, keys, key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise LoadError(f"{key} differs between layers, which is not supported", file=file.path, found=value)
    return value[0]


def _head_dim(file: GGUFFile, keys: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    head_dim = keys.get("attention.key_length") or hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise LoadError(f"{key} differs from the head size", file=file.path, expected=head_dim, found=keys[key])
    return head_dim


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """Every id that ends a turn or the text counts as end of sequence; one alone is a plain int."""
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_parameters(file: GGUFFile, keys: dict[str, Any], head_dim: int) -> dict[str, Any]:
    theta = keys.get("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", 0.0)
    if "rope.scale_linear" in keys and "rope.scaling.type" not in keys:  # the older spelling
        kind, factor = "linear", keys["rope.scale_linear"]
    frequencies = file.tensors.get("rope_freqs.weight")
    if frequencies is not None:
        if kind != "none":
            raise LoadError(f"rope_freqs.weight together with rope scaling {kind!r}", file=file.path)
        factors = dequantize(file.raw(frequencies), frequencies.type).reshape(-1).astype(np.float64)
        return {"rope_theta": theta, **_llama3_from_factors(file, factors, theta, head_dim)}
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise LoadError("rope scaling type", file=file.path, expected="none, linear or yarn", found=repr(kind))
    return {"rope_theta": theta, **_yarn(keys, factor)}


def _yarn(keys: dict[str, Any], factor: float) -> dict[str, Any]:
    scaling = {key.removeprefix("rope.scaling."): value for key, value in keys.items()}
    original = scaling.get("original_context_length", keys["context_length"])
    parameters = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for beta in ("beta_fast", "beta_slow"):
        if f"yarn_{beta}" in scaling:
            parameters[beta] = scaling[f"yarn_{beta}"]
    extra = scaling.get("yarn_attn_factor", scaling.get("attn_factor", 1.0))
    if extra != 1.0:
        # llama.cpp multiplies YaRN's own factor; Hugging Face's attention_factor replaces it.
        parameters["attention_factor"] = extra * (1.0 + 0.1 * log(factor))
    return parameters


def _llama3_from_factors(file: GGUFFile, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters from the divisors of the frequencies that llama.cpp stores instead of them.

    Between the two wavelengths 1/factor is a blend whose weight is linear in the frequency f:
    ``original * f / 2π = low + weight * (high - low)``. With low = 1 (a common scale of the three cancels out) two
    frequencies give the rest. The result is checked against every stored factor.
    """
    if factors.shape != (head_dim // 2,):
        name, expected = "rope_freqs.weight", head_dim // 2
        raise LoadError("factors of frequencies", file=file.path, tensor=name, expected=expected, found=len(factors))
    if np.allclose(factors, 1.0, rtol=1e-6):
        return {"rope_type": "default"}
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = float(factors.max())
    weight = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = (weight > 1e-5) & (weight < 1 - 1e-5)
    if between.sum() < 2:
        raise LoadError("not the frequencies of Llama 3's rope", file=file.path, tensor="rope_freqs.weight")
    slope, offset = np.polyfit(inverse[between], weight[between], 1)
    span = -1.0 / offset
    high, original = round(1.0 + span, 3), round(slope * span * 2 * pi)
    fitted = _llama3_factors(inverse, factor, high, original)
    if not np.allclose(fitted, factors, rtol=1e-4):
        raise LoadError("not the frequencies of Llama 3's rope", file=file.path, tensor="rope_freqs.weight")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama3_factors(inverse: np.ndarray, factor: float, high: float, original: int) -> np.ndarray:
    """The divisor of each frequency, float64[head_dim / 2]."""
    weight = np.clip((original * inverse / (2 * pi) - 1.0) / (high - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - weight) / factor + weight)
