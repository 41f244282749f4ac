"""What is read from a checkpoint's ``quantization_config``, and what refuses, by name."""

from typing import Any

import pytest
from quantized_model import CASES

from octavo.models.architectures import get_architecture
from octavo.models.config import ModelConfig
from octavo.models.errors import ModelConfigError
from octavo.models.quantization.methods import Gguf, choose_method, read_method
from octavo.models.quantization.spec import WeightSpec, can_fuse

BASE = "model.layers.3."
Q, V, DOWN = f"{BASE}self_attn.q_proj", f"{BASE}self_attn.v_proj", f"{BASE}mlp.down_proj"
AWQ, GPTQ, FP8 = (dict(CASES[name].quantization) for name in ("awq-32", "gptq-4", "fp8"))
PACK, FLOAT = (dict(CASES[name].quantization) for name in ("ct-pack-4", "ct-float-static"))


def weights(about: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = about["config_groups"]["group_0"]
    changed = {**group, "weights": {**group["weights"], **changes}}
    return {**about, "config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("about", "plain", "quantized"),
    [
        ({**AWQ, "modules_to_not_convert": ["v_proj", "layers.3.mlp"]}, (V, DOWN, "lm_head"), (Q,)),
        ({**FP8, "ignored_layers": [V, "mlp"]}, (V, DOWN), (Q, f"{BASE}mlp_extra.down_proj")),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}, (V,), (Q, DOWN)),
        ({**GPTQ, "dynamic": {r"-:.*\.v_proj": {}, r"+:.*v_proj": {"bits": 8}}}, (V,), (Q, DOWN)),
        ({**PACK, "ignore": ["re:.*self_attn", DOWN]}, (Q, V, DOWN), (f"{BASE}mlp.up_proj", "lm_head")),
        ({**PACK, "ignore": ["down_proj"]}, (), (DOWN,)),
    ],
)
def test_modules_that_stay_plain(about: dict[str, Any], plain: tuple[str, ...], quantized: tuple[str, ...]) -> None:
    method = read_method(about)
    assert method is not None
    assert [name for name in plain if method.weight_spec(name) is not None] == []
    assert [name for name in quantized if method.weight_spec(name) is None] == []


def test_targets_by_name_go_before_the_class() -> None:
    group = PACK["config_groups"]["group_0"]
    by_name = {**group, "targets": [DOWN, "re:.*v_proj"], "weights": {**group["weights"], "num_bits": 8}}
    method = read_method({**PACK, "config_groups": {"group_0": group, "group_1": by_name}})
    assert method is not None
    assert [method.weight_spec(name).bits for name in (Q, V, DOWN)] == [4, 8, 8]


def test_dynamic_changes_what_it_names() -> None:
    method = read_method({**GPTQ, "dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": -1, "sym": True}}})
    assert method is not None
    spec = method.weight_spec(DOWN)
    assert (spec.bits, spec.group_size, spec.has_zero) == (8, None, False)
    assert method.weight_spec(Q) == WeightSpec("gptq", "int", 4, 32, has_zero=True)


@pytest.mark.parametrize(
    ("about", "match"),
    [
        ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({**AWQ, "zero_point": False}, "zero_point False is not supported"),
        ({**AWQ, "bits": 8}, "bits 8"),
        ({**AWQ, "group_size": 0}, "group_size 0"),
        ({**AWQ, "group_size": None}, "group_size must be an integer, got None"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        ({**GPTQ, "bits": 5}, "bits 5 is not supported; supported: 2, 3, 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "lm_head": True}, "lm_head True"),
        ({**GPTQ, "desc_act": "yes"}, "desc_act must be true or false, got 'yes'"),
        ({**GPTQ, "dynamic": {"+:(": {"bits": 8}}}, r"dynamic: '\(' is no regular expression"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 6}}}, r"dynamic\['\+:\.\*'\]: bits 6"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({**FP8, "activation_scheme": "static", "weight_block_size": [128, 128]}, "activation_scheme 'static'"),
        ({**PACK, "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({**PACK, "quantization_status": "frozen"}, "quantization_status 'frozen'"),
        (weights(PACK, num_bits=3), "num_bits 3"),
        (weights(PACK, strategy="tensor_group"), "strategy 'tensor_group'"),
        (weights(PACK, dynamic=True), "dynamic True"),
        (weights(FLOAT, num_bits=4), "type 'float4'"),
        (weights(FLOAT, strategy="block"), "block_structure None"),
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes' is not supported; supported: awq, gptq, fp8"),
        ({"bits": 4}, "method 'unnamed'"),
        ([4], "quantization_config must be an object"),
    ],
)
def test_refusals_name_the_key(about: Any, match: str) -> None:
    with pytest.raises(ModelConfigError, match=match):
        read_method(about)


def test_what_is_asked_for() -> None:
    stored = read_method(AWQ)
    assert choose_method(None, stored, None) is stored
    assert choose_method("awq_marlin", stored, None) is stored
    assert choose_method(None, None, {}) is None
    assert choose_method("gguf", None, {Q: "Q4_1", V: "Q6_K"}) == Gguf({Q: "Q4_1", V: "Q6_K"})
    assert Gguf({Q: "Q4_1", V: "Q6_K"}).weight_spec(V) is None
    with pytest.raises(ModelConfigError, match="'int8' was asked for, but the checkpoint is 'awq'"):
        choose_method("int8", stored, None)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def decoder(**changes: Any) -> Any:
    config = ModelConfig.from_dict({**LLAMA, **changes})
    return get_architecture(config.architecture).decoder_config(config)


def test_layers_know_how_they_are_quantised() -> None:
    config = decoder(quantization_config={**AWQ, "modules_to_not_convert": ["layers.1.", "k_proj"]})
    first, second = config.layers
    spec = WeightSpec("awq", "int", 4, 32, has_zero=True)
    assert first.weight_specs("qkv") == (spec, None, spec)
    assert first.weight_specs("down") == (spec,)
    assert second.quantization == ()
    assert can_fuse((spec, spec))
    assert not can_fuse(first.weight_specs("qkv"))


def test_an_output_layer_that_is_quantised_refuses() -> None:
    about = {**PACK, "ignore": []}
    with pytest.raises(ModelConfigError, match=r"lm_head is quantised .*served unquantised only"):
        decoder(quantization_config=about)
    assert decoder(quantization_config=about, tie_word_embeddings=True).layers[0].quantization


def test_experts_that_are_quantised_refuse() -> None:
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    }
    assert decoder(**experts).layers[0].moe is not None
    with pytest.raises(ModelConfigError, match="experts: a mixture of experts is served unquantised only, not as awq"):
        decoder(**experts, quantization_config=AWQ)
