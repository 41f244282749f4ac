"""An engine whose KV cache is of another type than its weights, foremost float8."""

import logging
from pathlib import Path

import numpy as np
import pytest
from conftest_paths import CACHE_FOLDER
from safetensors.numpy import load_file, save_file
from tiny_model import tiny_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.engine.compile_cache import COMPILES
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 290 + 3 for j in range(16 + 5 * i % 37)] for i in range(6)]
HOST_GIB = 0.0005


def make_llm(folder: Path, kv_cache_dtype: str = "fp8", **options) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "compile_cache_dir": str(CACHE_FOLDER / "engine"),
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 200,
        "enforce_eager": True,
    }
    return LLM(str(folder), kv_cache_dtype=kv_cache_dtype, **{**defaults, **options})


def tokens(llm: LLM, prompts=PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [choice.token_ids for output in llm.generate(prompts, params, use_tqdm=False) for choice in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_prefix_cache_preemption_and_both_tiers_change_no_token(folder):
    """Compiled before ready. What a prompt's later chunks read of its earlier ones is rounded whoever wrote it, so
    neither sharing nor computing anew changes anything."""
    llm = make_llm(folder, num_gpu_blocks_override=18, swap_space=HOST_GIB, enforce_eager=False)
    alone = []
    for prompt in PROMPTS:
        alone += tokens(llm, [prompt])
        assert llm.reset_prefix_cache()
    assert llm._core.stats().prefix_cache_hits_total == 0
    compiles = COMPILES.after_ready
    for _ in range(2):
        assert tokens(llm) == alone
        llm._core.scheduler.check_integrity()
    stats = llm._core.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0
    assert stats.external_prefix_cache_hits_total > 0
    # Forks copy a block.
    nearly_greedy = SamplingParams(n=2, max_tokens=8, temperature=0.02, seed=0, ignore_eos=True)
    assert tokens(llm, PROMPTS[:1], nearly_greedy) == [alone[0]] * 2
    assert COMPILES.after_ready == compiles
    # The mutation: what lies in the pool decides the tokens.
    runner = llm._core.runner
    runner._state.kv[:] = [pool ^ 0x40 for pool in runner._state.kv]
    assert tokens(llm, PROMPTS[:1]) != alone[:1]


# ---- accuracy -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Values of some thousands, with an output projection as much smaller; scales that bring them into float8's
    range."""
    folder = tiny_model(tmp_path_factory.mktemp("scales"))
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if "self_attn" in name]:
        layer = name.split("self_attn")[0] + "self_attn."
        if "v_proj" in name:
            weights[name] = weights[name] * 1000
            weights[f"{layer}k_scale"] = np.asarray(0.05, np.float32)
            weights[f"{layer}v_scale"] = np.asarray(50.0, np.float32)
        elif "o_proj" in name:
            weights[name] = weights[name] / 1000
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def prompt_logprobs(llm: LLM) -> np.ndarray:
    """Of each prompt's tokens but its first, as the model predicts them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return np.asarray(
        [
            places[token].logprob
            for output in outputs
            for token, places in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def test_the_checkpoints_scales_keep_float8_close(calm):
    """Against float32: rounded to 3 bits of mantissa, a number is off by up to 6 %; saturated, by most of itself."""
    exact = prompt_logprobs(make_llm(calm, "auto"))

    def error(llm: LLM) -> float:
        return float(np.abs(prompt_logprobs(llm) - exact).mean())

    llm = make_llm(calm)
    params = llm._core.runner._params["layers"]
    assert [np.asarray(layer["attention"]["kv_scales"]).tolist() for layer in params] == [
        [pytest.approx(0.05), 50.0]
    ] * 2
    found = error(llm)
    for layer in params:  # the mutation: scales of 1
        layer["attention"]["kv_scales"] = layer["attention"]["kv_scales"] * 0 + 1
    assert llm.reset_prefix_cache()
    assert 3 * found < error(llm)
    assert found < 0.2


# ---- sizes and refusals ---------------------------------------------------------------------


def test_as_much_memory_holds_more_blocks(folder):
    """Four times as many as of float32, twice as many as of bfloat16; the metrics' numbers follow."""
    sizes = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**20}
    counts, itemsizes = {}, {"auto": 4, "bfloat16": 2, "fp8": 1}
    for dtype, itemsize in itemsizes.items():
        pools = make_llm(folder, dtype, **sizes)._core.runner._state.kv
        assert [pool.nbytes for pool in pools] == [2**19] * 2
        assert pools[0].itemsize == itemsize
        counts[dtype] = pools[0].shape[0]
    assert counts == {"auto": 512, "bfloat16": 1024, "fp8": 2048}


def test_a_cache_of_16_bits_beside_float32_weights(calm):
    """8 bits of mantissa: far closer than float8."""
    exact, found = (prompt_logprobs(make_llm(calm, dtype)) for dtype in ("auto", "bfloat16"))
    assert 0 < np.abs(found - exact).mean() < 0.03


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_ds_mla", "int8", "nvfp4", "float8_e4m3fn", "FP8", ""])
def test_other_types_are_refused_by_name(dtype):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype '{dtype}' is not supported; known: auto, fp8, fp8_e4m3, "):
        EngineConfig.from_args(EngineArgs(kv_cache_dtype=dtype))


def test_without_scales_one_warning(folder, caplog):
    with caplog.at_level(logging.WARNING):
        make_llm(folder)
    assert len([record for record in caplog.records if "no scales for a float8 KV cache" in record.getMessage()]) == 1
