"""config.json in all its spellings."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.models.architectures import ARCHITECTURES, get_architecture
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder_config import DecoderConfig, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def decoder(config: ModelConfig) -> DecoderConfig:
    return get_architecture(config.architecture).decoder_config(config)


def qwen2(**changes: Any) -> ModelConfig:
    return read(architectures=["Qwen2ForCausalLM"], **changes)


def test_plain_llama() -> None:
    config = read()
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (4, 2, 16, 4)
    assert config.rope_of(3) == RopeSpec(theta=5000.0, rotary_dim=16)
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id is None
    assert config.max_context_tokens == 512
    assert not config.tie_word_embeddings


OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "hidden_act",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "rms_norm_eps",
    "quantization_config",
    "text_config",
)


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_equals_absent(name: str) -> None:
    absent = {key: value for key, value in LLAMA.items() if key != name}
    assert ModelConfig.from_dict({**absent, name: None}) == ModelConfig.from_dict(absent)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_spellings_of_both_generations(spelling: dict[str, Any]) -> None:
    config = read(**spelling)
    assert config.rope_of(0) == RopeSpec(kind="linear", theta=5000.0, rotary_dim=16, factor=4.0)
    assert config.max_context_tokens == 2048


def test_rope_beside_text_model() -> None:
    inner = {key: value for key, value in LLAMA.items() if key not in ("architectures", "eos_token_id")}
    outer = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 9, "hidden_size": 1, "text_config": inner}
    config = ModelConfig.from_dict(outer)
    assert config.hidden_size == 64
    assert config.eos_token_ids == (9,)
    assert config.rope_of(0) == read().rope_of(0)


def test_rope_per_layer_type() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    config = read(layer_types=types, sliding_window=8, rope_parameters=ropes)
    assert config.rope_of(0) == RopeSpec(theta=1e4, rotary_dim=16)
    assert config.rope_of(1) == RopeSpec(kind="linear", theta=1e6, rotary_dim=16, factor=8.0)
    with pytest.raises(ModelConfigError, match="no entry for layer type 'sliding_attention'"):
        read(layer_types=types, rope_parameters={"full_attention": {"rope_theta": 1e4}}).rope_of(0)


def test_rope_numbers() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5}
    config = read(rope_scaling=yarn, max_position_embeddings=200)
    assert config.rope_of(0) == RopeSpec(
        kind="yarn", theta=5000.0, rotary_dim=16, factor=4.0, original_max_position=128, attention_factor=1.5
    )
    assert config.max_context_tokens == 512
    partial = read(partial_rotary_factor=0.5).rope_of(0)
    assert partial is not None
    assert partial.rotary_dim == 8
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read(rope_scaling=llama3).max_context_tokens == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NonsenseForCausalLM"]}, "NonsenseForCausalLM.*supported: Cohere2.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures must hold one name"),
        ({"rope_scaling": {"type": "nonsense"}}, "rope type 'nonsense'.*supported: default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "unknown keys.*mrope_section"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"quantization_config": {"quant_method": "hqq"}}, "method 'hqq' is not supported"),
        ({"hidden_act": "mish"}, "'mish' is not supported; supported: silu"),
        ({"torch_dtype": "float8"}, "'float8' is not supported"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"layer_types": ["full_attention"]}, "must name each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "'mamba' is not supported"),
        ({"eos_token_id": [2, "x"]}, "token ids must be non-negative integers, got 'x'"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"hidden_act": ["silu"]}, "is not supported; supported: silu"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported; supported: default"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "4"}}, "original_max_position_emb"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "x", "mscale_all_dim": 1}}, "mscale must be"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention must be an object"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)


def test_no_rope_layers_that_is_no_list_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="no_rope_layers must say"):
        decoder(read(architectures=["SmolLM3ForCausalLM"], no_rope_layers=1))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ModelConfigError, match=r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        decoder(read(num_key_value_heads=3))


def test_eos_is_the_union() -> None:
    generation = {"eos_token_id": [7, 2, 9], "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 64}
    config = ModelConfig.from_dict(LLAMA, generation)
    assert config.eos_token_ids == (2, 7, 9)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}


def test_dtype_spellings() -> None:
    assert read(torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(dtype="torch.float16").dtype == "float16"
    assert read().dtype is None


def test_windows_of_qwen2() -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in decoder(qwen2(sliding_window=32, **changes)).layers)

    assert windows(max_window_layers=1) == (None,) * 4
    assert windows(max_window_layers=1, use_sliding_window=False) == (None,) * 4
    assert windows(max_window_layers=1, use_sliding_window=True) == (None, 32, 32, 32)
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows(use_sliding_window=True, layer_types=types) == (None, 32, None, None)
    with pytest.raises(ModelConfigError, match="sliding_window is not given"):
        windows(use_sliding_window=False, layer_types=types)


def test_windows_of_other_families() -> None:
    mistral = read(architectures=["MistralForCausalLM"], sliding_window=16)
    assert [layer.window for layer in decoder(mistral).layers] == [16] * 4
    assert [layer.window for layer in decoder(read(sliding_window=16)).layers] == [None] * 4


def test_gemma3_context_is_not_stretched_twice() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert read(architectures=["Gemma3ForCausalLM"], rope_scaling=scaling).max_context_tokens == 512
    assert read(rope_scaling=scaling).max_context_tokens == 4096


def test_biases_follow_the_config() -> None:
    assert decoder(read(attention_bias=True)).o_bias
    assert not decoder(read(attention_bias=True)).mlp_bias
    assert decoder(read(mlp_bias=True)).mlp_bias
    assert decoder(qwen2()).qkv_bias
    assert not decoder(qwen2()).o_bias


def test_from_folder_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path) == read()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2, 5)
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "vocab_size": 400, "eos_token_id": None}
    changed = ModelConfig.from_folder(tmp_path, overrides)
    assert changed.vocab_size == 400
    assert changed.eos_token_ids == (5,)
    assert changed.rope_of(0) == RopeSpec(kind="linear", theta=5000.0, rotary_dim=16, factor=2.0)
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ModelConfigError, match=name):
            ModelConfig.from_folder(tmp_path)
        (tmp_path / name).unlink()


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="JSON object"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_registered_architecture(name: str) -> None:
    architecture = get_architecture(name)
    assert architecture.name == name
    config = decoder(read(architectures=[name]))
    targets = [mapping.target for mapping in architecture.weight_mappings(config)]
    assert len(set(targets)) == len(targets)


def test_tied_head_is_ignorable() -> None:
    architecture = get_architecture("LlamaForCausalLM")
    tied, untied = decoder(read(tie_word_embeddings=True)), decoder(read())
    assert r"lm_head\.weight" in architecture.ignorable_names(tied)
    assert r"lm_head\.weight" not in architecture.ignorable_names(untied)
    assert "head.weight" in {mapping.target for mapping in architecture.weight_mappings(untied)}
    assert "head.weight" not in {mapping.target for mapping in architecture.weight_mappings(tied)}


def test_decoder_config_is_hashable_and_checks_itself() -> None:
    config = decoder(read())
    assert hash(config) == hash(decoder(read()))
    with pytest.raises(ModelConfigError, match="window must be positive"):
        dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], window=0),))
    layer = dataclasses.replace(config.layers[0], rope=RopeSpec(theta=1e4, rotary_dim=32))
    with pytest.raises(ModelConfigError, match="rotary_dim 32 exceeds head_dim 16"):
        dataclasses.replace(config, layers=(layer,))


def test_reading_a_config_needs_no_jax() -> None:
    code = (
        "import sys; from octavo.models.config import ModelConfig; from octavo.models.architectures import "
        "ARCHITECTURES, get_architecture; [get_architecture(n) for n in ARCHITECTURES]; "
        "sys.exit(int('jax' in sys.modules or 'flax' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
