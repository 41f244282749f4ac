"""Quantised checkpoints through the whole engine: the same logits as the plain weights that they stand for."""

from pathlib import Path

import pytest
from conftest_paths import CACHE_FOLDER
from quantized_model import CASES, write_quantized

from octavo import LLM, SamplingParams
from octavo.engine.errors import ConfigError

PROMPT = [(11 * i) % 290 + 3 for i in range(16)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)


def make_llm(folder: Path, **options) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "compile_cache_dir": str(CACHE_FOLDER / "quantized"),
        "enforce_eager": True,
        "block_size": 4,
        "max_model_len": 32,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 12,
    }
    return LLM(str(folder), **{**defaults, **options})


def logprobs(folder: Path, **options) -> dict[int, float]:
    """The 20 likeliest tokens after the prompt."""
    (output,) = make_llm(folder, **options).generate([PROMPT], PARAMS, use_tqdm=False)
    return {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}


def difference(found: dict[int, float], expected: dict[int, float]) -> float:
    shared = found.keys() & expected.keys()
    assert len(shared) > 15
    return max(abs(found[token] - expected[token]) for token in shared)


@pytest.mark.parametrize(
    "name",
    ["awq-32", "gptq-4", "gptq-8-sym", "gptq-4-act", "fp8", "fp8-static", "fp8-blocks", "ct-pack-4-asym", "ct-int"],
)
def test_a_quantised_checkpoint_is_served_as_the_weights_it_stands_for(tmp_path, name):
    folder = write_quantized(tmp_path, CASES[name])
    expected = logprobs(folder / "plain")
    assert difference(logprobs(folder / "quantized"), expected) < 1e-5


def test_a_method_that_contradicts_the_checkpoint_refuses(tmp_path):
    folder = write_quantized(tmp_path, CASES["awq-32"])
    for part, asked, match in [
        ("quantized", "gptq", "quantization 'gptq' was asked for, but the checkpoint is 'awq'"),
        ("quantized", "fp8", "the checkpoint is 'awq'"),
        ("plain", "awq", "'awq' was asked for, but the checkpoint is not quantised"),
        ("plain", "gguf", "the checkpoint is not quantised"),
        ("plain", "bitsandbytes", "quantization 'bitsandbytes' is unknown; known: awq, gptq"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make_llm(folder / part, quantization=asked)
