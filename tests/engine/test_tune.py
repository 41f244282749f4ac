"""``octavo tune``: what it refuses, what it writes, and that the kernels then take it. A fake clock, no GPU."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from octavo.engine import tune as tune_module
from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.tune import TuneOptions, attention_shape, model_shapes, tasks, tune
from octavo.pallas_kernels import dispatch, paged_attention, quantized_matmul, ragged_paged_attention, tuning
from octavo.pallas_kernels.autotune import CandidateError
from octavo.pallas_kernels.grouped_matmul import mosaic_tiles
from octavo.pallas_kernels.paged_attention.config import mosaic_tuning
from octavo.pallas_kernels.quantized_matmul.config import mosaic_tuning as mosaic_product_tuning
from octavo.pallas_kernels.tuning import use_folder

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def fake_measure(task):
    """Best in 6 stages and, of attention, at 64 keys; with 4 stages nothing works."""

    def measure(config):
        if config.stages == 4:
            raise CandidateError("spills")
        return (1e-6 * (1 + abs(getattr(config, "tile_kv", 64) - 64) + abs(config.stages - 6)),)

    return measure


def tune_faked(model, tmp_path, progress=lambda text: None, **options):
    return tune(TuneOptions(model, **options), output_dir=tmp_path, progress=progress, make_measure=fake_measure)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(tune_module.jax, "devices", lambda: [H200])
    monkeypatch.setattr(dispatch, "mosaic_missing", lambda: None)


def test_without_a_gpu_it_refuses_by_name(tmp_path):
    with pytest.raises(ConfigError, match="measures on an NVIDIA GPU; JAX runs on cpu"):
        tune_faked("llama-3-8b", tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_it_writes_is_what_the_kernels_take(on_h200, tmp_path, monkeypatch):
    told = []
    paths = tune_faked("llama-3-8b", tmp_path, told.append)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "nvidia-h200/paged_attention.json",
        "nvidia-h200/ragged_paged_attention.json",
    ]
    assert any("stages=4" in line and "left out, CandidateError: spills" in line for line in told)
    monkeypatch.undo()

    q = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    pools = [jax.ShapeDtypeStruct((9, 2, 8, 16, 128), dtype) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn)]
    monkeypatch.setattr(tuning, "current_gpu", lambda: "NVIDIA H200")
    for module, kv in itertools.product((paged_attention, ragged_paged_attention), pools):
        before = module._mosaic_tuning(q, kv, None)
        use_folder(tmp_path)
        try:
            tuned = module._mosaic_tuning(q, kv, None)
        finally:
            use_folder(None)
        assert (tuned.tile_kv, tuned.stages) == (64, 6)
        assert before.stages != 6
        assert module._mosaic_tuning(q, kv, None) == before
    assert paged_attention._mosaic_tuning(q, kv, "interpreter") == mosaic_tuning(128, 2, interpreted=True)


def test_a_second_model_joins_the_first(on_h200, tmp_path):
    options = {"kv_cache_dtype": "auto"}
    tune_faked("llama-3-8b", tmp_path, **options)
    tune_faked("llama-3-8b", tmp_path, tensor_parallel_size=2, **options)
    (path, _) = tune_faked("gemma-2-9b", tmp_path, **options)
    shapes = [entry["when"] for entry in json.loads(path.read_text(encoding="utf-8"))]
    heads = sorted((when["num_heads"], when["num_kv_heads"], when["head_dim"]) for when in shapes)
    assert heads == [(16, 4, 128), (16, 8, 256), (32, 8, 128)]


def test_shapes_of_models_and_their_shares(on_h200, tmp_path):
    options = TuneOptions("llama-3-8b", tensor_parallel_size=4)
    model = model_shapes(options)
    shape = attention_shape(options, model)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, model.max_model_len) == (8, 2, 128, 8192)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 8 KV heads"):
        model_shapes(TuneOptions("llama-3-8b", tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="block_size 8: "):
        tune_faked("llama-3-8b", tmp_path, block_size=8)
    with pytest.raises(ConfigError, match="nothing"):
        tune_faked(str(tmp_path / "nothing"), tmp_path)


def titles(model, **options):
    """Of the operations other than attention."""
    options = TuneOptions(model, **options)
    found = [task for task in tasks(options, model_shapes(options)) if "attention" not in task.operation]
    return list(dict.fromkeys(task.title.rpartition(", ")[0] for task in found))


def test_products_of_a_model_and_of_a_devices_share():
    """qkv, o, gate and up, down: those with packed weights only, and experts."""
    assert titles("llama-3-8b") == []
    found = titles("llama-3-8b", quantization="int8")
    assert {title.partition(", groups")[0].split("w8a16 ")[1] for title in found} == {
        "6144 x 4096",
        "4096 x 4096",
        "28672 x 4096",
        "4096 x 14336",
    }
    half = titles("qwen2.5-72b-awq", tensor_parallel_size=2)
    assert {title.partition(", groups")[0].split("w4a16 ")[1] for title in half} == {
        "5120 x 8192",
        "8192 x 4096",
        "29696 x 8192",
        "8192 x 14848",
    }
    assert titles("qwen3-30b-a3b", tensor_parallel_size=4) == ["grouped_matmul, 128 experts of 2048 x 192"]


def test_measured_products_are_what_the_kernels_take(on_h200, tmp_path, monkeypatch):
    options = {"kv_cache_dtype": "auto", "tensor_parallel_size": 8}
    names = [path.name for path in tune_faked("qwen2.5-72b-awq", tmp_path, **options)]
    assert "quantized_matmul.json" in names
    assert "grouped_matmul.json" in [path.name for path in tune_faked("mixtral-8x7b", tmp_path, **options)]
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "current_gpu", lambda: "NVIDIA H200")
    use_folder(tmp_path)
    try:
        for num_tokens in (1, 24, 256):
            assert quantized_matmul._tuning(num_tokens, (1280, 8192), 4, 128, None).stages == 6
        assert quantized_matmul._tuning(8, (1280, 8192), 8, 128, None) == mosaic_product_tuning(
            8, 1280, 8192, bits=8, group_size=128
        )
        for num_rows in (1, 100, 8 * 1024):
            assert mosaic_tiles(num_rows, 8, (2 * 1792, 4096)).stages == 6
        assert mosaic_tiles(8 * 1024 + 1, 8, (2 * 1792, 4096)).stages == 3
        assert mosaic_tiles(64, 8, (2 * 1792, 4096), "interpreter").stages == 4
    finally:
        use_folder(None)


def test_without_a_usable_candidate_nothing_is_written_and_it_is_said(on_h200, tmp_path):
    def measure(config):
        raise CandidateError("no such instruction")

    told = []
    with pytest.raises(ConfigError, match="no candidate of any kernel"):
        tune(TuneOptions("llama-3-8b"), output_dir=tmp_path, progress=told.append, make_measure=lambda task: measure)
    assert not list(tmp_path.iterdir())
    assert any(line.startswith("paged_attention: left out") and "no such instruction" in line for line in told)


def test_an_engine_takes_the_folder_and_refuses_one_that_is_not_there(tmp_path):
    assert EngineConfig.from_args(EngineArgs(tuned_config_folder=str(tmp_path))).tuned_config_folder == str(tmp_path)
    with pytest.raises(ConfigError, match=r"tuned_config_folder '.*nowhere' is not a folder"):
        EngineConfig.from_args(EngineArgs(tuned_config_folder=str(tmp_path / "nowhere")))
