"""What is particular about an architecture's config.json and its tensors: read right, or refused by name."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from octavo.models.architectures import ARCHITECTURES, get_architecture
from octavo.models.config import ModelConfig
from octavo.models.decoder_config import DecoderConfig
from octavo.models.errors import ModelConfigError
from octavo.models.loading.dummy import dummy_params
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model

GOLDENS = json.loads((Path(__file__).resolve().parent / "goldens" / "cases.json").read_text(encoding="utf-8"))


def built(case: str, **changes: Any) -> DecoderConfig:
    config = ModelConfig.from_dict({**GOLDENS[case], **changes})
    return get_architecture(config.architecture).decoder_config(config)


def tensors_of(case: str) -> dict[str, np.ndarray]:
    """Random, under the names and in the shapes that a checkpoint has."""
    rng = np.random.default_rng(3)
    mappings = get_architecture(GOLDENS[case]["architectures"][0]).weight_mappings(built(case))
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for mapping in mappings
        for name, shape in zip(mapping.sources, mapping.stored_shapes, strict=True)
    }


def load(folder: Path, case: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GOLDENS[case]))
    save_file(tensors, folder / "model.safetensors")
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    decoder, mesh = architecture.decoder_config(model.config), Mesh(np.array(jax.devices()[:1]), ("tp",))
    return load_params(model.path, architecture, decoder, dtype=jnp.float32, mesh=mesh, load_format=model.format)


@pytest.mark.parametrize(
    ("case", "prefix", "names"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.", ("w1", "w3", "w2")),
        ("qwen2_moe", "model.layers.2.mlp.", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_are_stacked_in_their_order(
    tmp_path: Path, case: str, prefix: str, names: tuple[str, str, str]
) -> None:
    tensors = tensors_of(case)
    layer = load(tmp_path, case, tensors)["layers"][int(prefix.split(".")[2])]["mlp"]
    count = layer["experts"]["down"]["weight"].shape[0]
    assert count == GOLDENS[case].get("num_local_experts", GOLDENS[case].get("num_experts"))
    for expert in range(count):
        gate, up, down = (tensors[f"{prefix}experts.{expert}.{name}.weight"] for name in names)
        assert np.array_equal(layer["experts"]["gate_up"]["weight"][expert], np.concatenate([gate, up]))
        assert np.array_equal(layer["experts"]["down"]["weight"][expert], down)
        other = tensors[f"{prefix}experts.{(expert + 1) % count}.{names[2]}.weight"]
        assert not np.array_equal(layer["experts"]["down"]["weight"][expert], other)
    assert np.array_equal(layer["router"]["weight"], tensors[f"{prefix}gate.weight"])


def test_an_expert_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("mixtral")
    name = "model.layers.0.block_sparse_moe.experts.{}.w3.weight"
    last = tensors.pop(name.format(3))
    with pytest.raises(LoadError, match=r"lacks 1 tensors: model\.layers\.0\.block_sparse_moe\.experts\.3\.w3"):
        load(tmp_path, "mixtral", tensors)
    with pytest.raises(LoadError, match=r"does not use: model\.layers\.0\.block_sparse_moe\.experts\.4\.w3"):
        load(tmp_path, "mixtral", {**tensors, name.format(3): last, name.format(4): last})
    with pytest.raises(LoadError, match=r"experts\.3\.w3\.weight.*expected.*\(96, 64\).*\(64, 96\)"):
        load(tmp_path, "mixtral", {**tensors, name.format(3): np.ascontiguousarray(last.T)})


def test_gpt2_with_and_without_its_prefix(tmp_path: Path) -> None:
    """The oldest files have masks among the tensors, and no ``transformer.`` before the names."""
    tensors = tensors_of("gpt2")
    whole = load(tmp_path / "new", "gpt2", tensors)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{i}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for i in range(2)}
    bare = load(tmp_path / "old", "gpt2", old)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, bare))
    attention = whole["layers"][1]["attention"]
    assert np.array_equal(attention["qkv"]["weight"], tensors["transformer.h.1.attn.c_attn.weight"].T)
    assert np.array_equal(attention["o"]["weight"], tensors["transformer.h.1.attn.c_proj.weight"].T)
    with pytest.raises(LoadError, match=r"does not use: h\.0\.attn\.surprise"):
        load(tmp_path / "old", "gpt2", {**old, "h.0.attn.surprise": old["wpe.weight"]})


def test_gpt2s_own_keys() -> None:
    config = ModelConfig.from_dict(GOLDENS["gpt2"])
    assert (config.hidden_size, config.num_layers, config.num_heads) == (64, 2, 4)
    assert (config.intermediate_size, config.max_context_tokens) == (256, 64)
    decoder = built("gpt2", n_inner=80)
    assert (decoder.intermediate_size, decoder.learned_positions, decoder.rope_specs) == (80, 64, ())
    assert decoder.activation == "gelu_tanh"


def test_layers_without_experts() -> None:
    def sparse(**changes: Any) -> list[int]:
        return [i for i, layer in enumerate(built("qwen3_moe", **changes).layers) if layer.moe is not None]

    assert sparse() == [0, 1]
    assert sparse(num_hidden_layers=5, decoder_sparse_step=2) == [1, 3]
    assert sparse(num_hidden_layers=4, mlp_only_layers=[0, 2]) == [1, 3]
    (spec,) = {layer.moe for layer in built("qwen3_moe").layers if layer.moe}
    assert (spec.num_experts, spec.experts_per_token, spec.intermediate_size) == (8, 3, 32)
    assert spec.shared_intermediate_size is None
    assert built("qwen3_moe", num_experts=None, num_local_experts=9).layers[1].moe.num_experts == 9


def test_cohere2_turns_only_windowed_layers() -> None:
    layers = built("cohere2", num_hidden_layers=4, sliding_window_pattern=None).layers
    assert [layer.window for layer in layers] == [9, 9, 9, None]
    assert [layer.rope is not None and layer.rope.interleaved for layer in layers] == [True, True, True, False]
    assert layers[3].rope is None
    named = built("cohere2", layer_types=["full_attention", "sliding_attention"]).layers
    assert [layer.rope is None for layer in named] == [True, False]


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx of True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights of False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "GPT-2"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 experts per token"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "mixture of exp"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("starcoder2", {"use_bias": "yes"}, "use_bias"),
    ],
)
def test_what_cannot_be_served_refuses(case: str, changes: dict[str, Any], named: str) -> None:
    assert built(case)
    with pytest.raises(ModelConfigError, match=named):
        built(case, **changes)


def test_an_unknown_architecture_gets_the_list() -> None:
    with pytest.raises(ModelConfigError) as refused:
        built("llama", architectures=["DeepseekV3ForCausalLM"])
    assert all(name in str(refused.value) for name in ("DeepseekV3ForCausalLM", *ARCHITECTURES))


def test_dummy_norms_change_nothing() -> None:
    """Weights of one, biases of zero."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    norm = dummy_params(built("gpt2"), dtype=jnp.float32, mesh=mesh)["layers"][0]["mlp_norm"]
    assert np.array_equal(norm["weight"], np.ones(64))
    assert np.array_equal(norm["bias"], np.zeros(64))
