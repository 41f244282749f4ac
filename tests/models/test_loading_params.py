"""From a folder of safetensors to the decoder's parameters: values, refusals, shards, dummies, memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from octavo.models.architectures import get_architecture
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 32, 4, 2, 8, 48, 40, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def make_tensors(seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.mlp.gate_proj": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj": (HIDDEN, FFN),
            f"model.layers.{i}.input_layernorm": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm": (HIDDEN,),
        }
    rng = np.random.default_rng(seed)
    return {f"{name}.weight": rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_sharded(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Every third name in each of three files, so that fused tensors span files. Returns the weight map."""
    names = list(tensors)
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(folder: Path, *, dtype: Any = jnp.float32, load_format: str = "auto", devices: int = 1) -> dict[str, Any]:
    model = resolve_model(str(folder), load_format=load_format)
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    decoder_config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, decoder_config, dtype=dtype, mesh=mesh, load_format=model.format)


def row_error(found: Any, expected: Any) -> float:
    """The largest relative error of a row."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def expected_layer(tensors: dict[str, np.ndarray], layer: int, projections: str = "qkv") -> dict[str, np.ndarray]:
    prefix = f"model.layers.{layer}."
    fused = [tensors[f"{prefix}self_attn.{p}_proj.weight"] for p in projections]
    gate_up = [tensors[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up")]
    return {
        "qkv": np.concatenate(fused),
        "o": tensors[f"{prefix}self_attn.o_proj.weight"],
        "gate_up": np.concatenate(gate_up),
        "down": tensors[f"{prefix}mlp.down_proj.weight"],
    }


def layer_errors(params: dict[str, Any], tensors: dict[str, np.ndarray], **keywords: str) -> float:
    worst = 0.0
    for i, layer in enumerate(params["layers"]):
        for name, value in expected_layer(tensors, i, **keywords).items():
            part = layer["attention" if name in ("qkv", "o") else "mlp"]
            worst = max(worst, row_error(part[name]["weight"], value))
    return worst


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_every_value_arrives_in_its_place(tmp_path: Path, sharded: bool) -> None:
    tensors = make_tensors()
    write_config(tmp_path)
    if sharded:
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    params = load(tmp_path)
    assert row_error(params["embed"]["weight"], tensors["model.embed_tokens.weight"]) == 0
    assert row_error(params["head"]["weight"], tensors["lm_head.weight"]) == 0
    assert row_error(params["norm"]["weight"], tensors["model.norm.weight"]) == 0
    assert layer_errors(params, tensors) == 0
    second_norm = params["layers"][1]["mlp_norm"]["weight"]
    assert row_error(second_norm, tensors["model.layers.1.post_attention_layernorm.weight"]) == 0
    # The check sees what it is for: q, k and v in another order.
    assert layer_errors(params, tensors, projections="qvk") > 0.5


@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_dtypes_are_cast(tmp_path: Path, stored: str, wanted: str) -> None:
    exact = make_tensors()
    write_config(tmp_path)
    save_file({k: v.astype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored) for k, v in exact.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    params = load(tmp_path, dtype=jnp.dtype(wanted))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {wanted}
    error = row_error(params["embed"]["weight"].astype(jnp.float32), exact["model.embed_tokens.weight"])
    assert 1e-5 < error < (1e-2 if "bfloat16" in (stored, wanted) else 1e-3)


def test_a_weight_beyond_float16_is_refused_not_made_infinite(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 70000.0
    write_config(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.down_proj.*float16"):
        load(tmp_path, dtype=jnp.float16)
    assert np.asarray(load(tmp_path)["layers"][1]["mlp"]["down"]["weight"])[3, 5] == 70000.0


def test_tied_embeddings_ignore_a_stored_head(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["lm_head.weight"][:] = 0
    write_config(tmp_path, tie_word_embeddings=True)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(tmp_path)
    assert "head" not in params
    assert row_error(params["embed"]["weight"], tensors["model.embed_tokens.weight"]) == 0


def test_known_ignorable_names_pass_and_others_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_config(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    tensors["surprise"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"2 tensors.*q_proj\.bias, surprise"):
        load(tmp_path)


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    write_config(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lacks 2 tensors: lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_wrong_shape_names_file_tensor_expected_and_found(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((KV_HEADS * HEAD_DIM, HIDDEN + 1), np.float32)
    write_config(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        load(tmp_path)
    error = caught.value
    assert error.file == tmp_path / "model.safetensors"
    assert error.tensor == "model.layers.0.self_attn.k_proj.weight"
    assert (error.expected, error.found) == ((16, 32), (16, 33))
    assert all(part in str(error) for part in ("model.safetensors", "k_proj", "(16, 32)", "(16, 33)"))


def test_integer_weights_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((HIDDEN, FFN), np.int8)
    write_config(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"down_proj.*expected BF16 or F16 or F32 or F64, found I8"):
        load(tmp_path)


def test_dummy_weights_follow_from_the_name_alone(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.asarray(first["layers"][0]["attention_norm"]["weight"]) == 1)
    qkv = [np.asarray(layer["attention"]["qkv"]["weight"]) for layer in first["layers"]]
    assert 0.015 < qkv[0].std() < 0.025
    assert not np.array_equal(qkv[0], qkv[1])


def test_progress_is_a_bar_of_bytes_on_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    model = resolve_model(str(tmp_path))
    architecture = get_architecture(model.config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    arguments: tuple[Any, ...] = (model.path, architecture, architecture.decoder_config(model.config))
    keywords: dict[str, Any] = {"dtype": jnp.float32, "mesh": mesh, "load_format": model.format}
    load_params(*arguments, **keywords)
    assert capfd.readouterr() == ("", "")
    load_params(*arguments, **keywords, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err
    assert "B/s" in err


SUBPROCESS = """
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from octavo.models.architectures import get_architecture
from octavo.models.decoder import abstract_params
from octavo.models.loading.loader import load_params, resolve_model

def rss(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

model = resolve_model(sys.argv[1])
architecture = get_architecture(model.config.architecture)
config = architecture.decoder_config(model.config)
mesh = Mesh(np.array(jax.devices()), ("tp",))
jax.block_until_ready(jnp.zeros(8))
abstract_params(config, jnp.float32)  # what tracing takes is not the loader's
before = rss("VmRSS")
params = load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)
leaves = jax.tree.leaves(params)
down = params["layers"][0]["mlp"]["down"]["weight"]
print(json.dumps({
    "extra": rss("VmHWM") - before - sum(leaf.nbytes for leaf in leaves),
    "devices": len(jax.devices()),
    "sums": [float(np.abs(np.asarray(leaf)).sum()) for leaf in leaves],
    "split": len(params["layers"][0]["attention"]["qkv"]["weight"].sharding.device_set),
    "shard": down.addressable_shards[-1].data.shape,
}))
"""


def run_load(folder: Path, devices: int) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", SUBPROCESS, str(folder)],
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_devices_hold_the_same_values_in_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_config(tmp_path)
    write_sharded(tmp_path, tensors)
    found = run_load(tmp_path, 2)
    assert (found["devices"], found["split"]) == (2, 2)
    assert found["shard"] == [HIDDEN, FFN // 2]
    expected = [float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(load(tmp_path))]
    np.testing.assert_allclose(found["sums"], expected, rtol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_the_host_holds_little_more_than_the_parameters(tmp_path: Path) -> None:
    """Six files of 26 MiB in bfloat16 become 312 MiB of parameters; beside them at most two files and a tensor."""
    layers, hidden, ffn = 6, 1024, 3 * 1024
    rng = np.random.default_rng(0)
    weight_map = {}

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(0, 1 << 14, shape, np.uint16).view(ml_dtypes.bfloat16)

    for i in range(layers):
        prefix, file = f"model.layers.{i}.", f"model-{i:05}.safetensors"
        part = {f"{prefix}self_attn.{p}_proj.weight": draw(hidden, hidden) for p in "qkvo"}
        part |= {f"{prefix}mlp.{p}_proj.weight": draw(ffn, hidden) for p in ("gate", "up")}
        part[f"{prefix}mlp.down_proj.weight"] = draw(hidden, ffn)
        part |= {f"{prefix}{n}_layernorm.weight": draw(hidden) for n in ("input", "post_attention")}
        if i == 0:
            part |= {"model.embed_tokens.weight": draw(VOCAB, hidden), "model.norm.weight": draw(hidden)}
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(tmp_path, weight_map)
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 8}
    write_config(tmp_path, **sizes, num_key_value_heads=8, tie_word_embeddings=True)
    largest = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    fused_bytes = 2 * ffn * hidden * 4
    extra = run_load(tmp_path, 1)["extra"]
    limit = 2 * largest + fused_bytes + (56 << 20)  # the last for threads and allocators
    assert limit < 6 * largest + fused_bytes  # keeping every file mapped would not pass
    assert extra < limit
