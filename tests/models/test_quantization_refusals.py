"""Quantised checkpoints that cannot be served refuse before a weight is read, with the method's name or the reason."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from quantized_model import CASES, CONFIG, F8, write_quantized
from safetensors.numpy import load_file, save_file

from octavo.models.architectures import get_architecture
from octavo.models.errors import ModelConfigError
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.quantization.methods import METHODS

PACK = dict(CASES["ct-pack-4"].quantization)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", **weights}}
    return {**PACK, "format": form, "config_groups": {"group_0": group}}


OTHER_METHODS = [
    "aqlm",
    "auto-round",
    "bitnet",
    "bitsandbytes",
    "eetq",
    "exl2",
    "experts_int8",
    "fp_quant",
    "higgs",
    "hqq",
    "marlin",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
    "quanto",
    "quark",
    "quip",
    "spqr",
    "torchao",
    "vptq",
]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        name: ({"quant_method": name, "bits": 4}, f"method '{name}' is not supported; supported: awq, gptq")
        for name in OTHER_METHODS
    },
    "bitsandbytes without a name": ({"load_in_4bit": True}, "method 'unnamed' is not supported"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported; supported: pack-"),
    "mxfp4": (compressed("mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not supported"),
    "mxfp8": (compressed("mxfp8-quantized", num_bits=8), "format 'mxfp8-quantized' is not supported"),
    "sparse marlin": (compressed("marlin-24", type="int", strategy="group"), "format 'marlin-24' is not supported"),
    "float4 under another name": (compressed("float-quantized"), "strategy 'tensor_group' is not supported"),
    "integers of 2 bits": (
        compressed("pack-quantized", num_bits=2, type="int", strategy="channel"),
        "num_bits 2 is not supported; supported: 4, 8",
    ),
    "sparse": ({**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24-"),
    "gptq on a head": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True},
        "lm_head True is not supported; supported: false: the output layer is served unquantised only",
    ),
    **{
        f"gptq of modules {value!r}": (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": value},
            "quantization_config: modules_in_block_to_quantize must be a list of names",
        )
        for value in (5, "q_proj", [5], [["q_proj", 5]], [["q_proj"], {}])
    },
    "a KV cache of 7": ({**PACK, "kv_cache_scheme": 7}, "quantization_config.kv_cache_scheme must be an object, got 7"),
    "a KV cache of integers": (
        {**PACK, "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme 'int8' is not supported; supported: float with 8 bits",
    ),
    "compressed-tensors on a head": ({**PACK, "ignore": []}, "lm_head is quantised (compressed-tensors)"),
}


def decoder(folder: Path, quantization: dict[str, Any] | None, **files: Any) -> Any:
    """What a start does before it opens a weight: the files here have none."""
    config = {**CONFIG, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = resolve_model(str(folder), load_format="dummy").config
    return get_architecture(found.architecture).decoder_config(found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    with pytest.raises(ModelConfigError) as caught:
        decoder(tmp_path, quantization)
    assert message in str(caught.value)


def test_the_table_is_of_others_than_are_served(tmp_path: Path) -> None:
    assert not set(REFUSED) & set(METHODS)
    for case in CASES.values():
        assert decoder(tmp_path, case.quantization).layers[0].quantization


def test_a_file_of_modelopt_beside_the_configuration_refuses(tmp_path: Path) -> None:
    about = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"quant_algo": "NVFP4"}}
    with pytest.raises(ModelConfigError, match="modelopt"):
        decoder(tmp_path, None, hf_quant_config=about)


def with_codes(tensors: dict[str, np.ndarray]) -> None:
    head = tensors.pop("lm_head.weight")
    tensors["lm_head.qweight"] = np.zeros((head.shape[1], len(head) // 8), np.int32)


def with_float8(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(F8)


def with_a_scale(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight_scale"] = np.ones((1,), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_codes, "lm_head.weight"),
        (with_float8, "lm_head.weight"),
        (with_a_scale, "lm_head.weight_scale"),
    ],
)
def test_a_head_that_is_quantised_without_a_word_refuses(tmp_path: Path, change: Any, message: str) -> None:
    """Where the configuration does not say so, the tensors do."""
    folder = write_quantized(tmp_path, CASES["awq-32"], tie_word_embeddings=False, vocab_size=304) / "quantized"
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    config = architecture.decoder_config(model.config)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    with pytest.raises(LoadError, match=message):
        load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)
