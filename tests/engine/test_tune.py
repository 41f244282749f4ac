"""``octavo tune``: what it refuses, what it writes, and that the kernels then take it. A fake clock, no GPU."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from octavo.engine import tune as tune_module
from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.tune import model_shape, tune
from octavo.pallas_kernels import dispatch, paged_attention, ragged_paged_attention, tuning
from octavo.pallas_kernels.autotune import CandidateError
from octavo.pallas_kernels.paged_attention.config import mosaic_tuning
from octavo.pallas_kernels.tuning import use_folder

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def fake_measure(operation, shape, cases):
    """Best at 64 keys in 6 stages; with 4 stages nothing works."""

    def measure(config):
        if config.stages == 4:
            raise CandidateError("spills")
        return tuple(1e-6 * (1 + abs(config.tile_kv - 64) + abs(config.stages - 6)) for _ in cases)

    return measure


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(tune_module.jax, "devices", lambda: [H200])
    monkeypatch.setattr(dispatch, "mosaic_missing", lambda: None)


def test_without_a_gpu_it_refuses_by_name(tmp_path):
    with pytest.raises(ConfigError, match="measures on an NVIDIA GPU; JAX runs on cpu"):
        tune("llama-3-8b", output_dir=tmp_path, make_measure=fake_measure)
    assert not list(tmp_path.iterdir())


def test_what_it_writes_is_what_the_kernels_take(on_h200, tmp_path, monkeypatch):
    told = []
    paths = tune("llama-3-8b", output_dir=tmp_path, progress=told.append, make_measure=fake_measure)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "nvidia-h200/paged_attention.json",
        "nvidia-h200/ragged_paged_attention.json",
    ]
    assert any("stages=4" in line and "left out, CandidateError: spills" in line for line in told)
    monkeypatch.undo()

    q = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((9, 2, 8, 16, 128), jnp.bfloat16)
    monkeypatch.setattr(tuning, "current_gpu", lambda: "NVIDIA H200")
    for module in (paged_attention, ragged_paged_attention):
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
    tune("llama-3-8b", output_dir=tmp_path, make_measure=fake_measure)
    tune("llama-3-8b", tensor_parallel_size=2, output_dir=tmp_path, make_measure=fake_measure)
    (path, _) = tune("gemma-2-9b", output_dir=tmp_path, make_measure=fake_measure)
    shapes = [entry["when"] for entry in json.loads(path.read_text(encoding="utf-8"))]
    heads = sorted((when["num_heads"], when["num_kv_heads"], when["head_dim"]) for when in shapes)
    assert heads == [(16, 4, 128), (16, 8, 256), (32, 8, 128)]


def test_shapes_of_models_and_their_shares(on_h200, tmp_path):
    shape, context = model_shape("llama-3-8b", 16, "bfloat16", 4)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, context) == (8, 2, 128, 8192)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 8 KV heads"):
        model_shape("llama-3-8b", 16, "bfloat16", 3)
    with pytest.raises(ConfigError, match="block_size 8: "):
        tune("llama-3-8b", block_size=8, output_dir=tmp_path, make_measure=fake_measure)
    with pytest.raises(ConfigError):
        tune(str(tmp_path / "nothing"), output_dir=tmp_path, make_measure=fake_measure)


def test_an_engine_takes_the_folder_and_refuses_one_that_is_not_there(tmp_path):
    assert EngineConfig.from_args(EngineArgs(tuned_config_folder=str(tmp_path))).tuned_config_folder == str(tmp_path)
    with pytest.raises(ConfigError, match=r"tuned_config_folder '.*nowhere' is not a folder"):
        EngineConfig.from_args(EngineArgs(tuned_config_folder=str(tmp_path / "nowhere")))
