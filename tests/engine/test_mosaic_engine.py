"""The whole engine over the Mosaic kernels, interpreted on the CPU: the same tokens as with the XLA attention."""

import pytest
from conftest_paths import CACHE_FOLDER
from tiny_model import tiny_model

from octavo import LLM, SamplingParams
from octavo.engine.errors import ConfigError
from octavo.pallas_kernels.compat import mosaic_missing

missing = mosaic_missing()
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing)), pytest.mark.timeout(600)]

PROMPTS = [[(7 * i + 3 * j) % 290 + 3 for j in range(length)] for i, length in enumerate((5, 17, 16))]


def make_llm(folder, backend: str, **options) -> LLM:
    """bfloat16, which the kernels take, with weights and logits far enough apart for near-ties not to matter."""
    defaults = {
        "skip_tokenizer_init": True,
        "compile_cache_dir": str(CACHE_FOLDER / "engine"),
        "dtype": "bfloat16",
        "block_size": 16,
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 24,
        "enforce_eager": True,
        "attention_backend": backend,
    }
    return LLM(str(folder), **{**defaults, **options})


@pytest.fixture(scope="session")
def mosaic_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-mosaic")
    return tiny_model(
        folder,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )


def generate(folder, backend: str, prompts, max_tokens: int, **options) -> tuple[LLM, list[list[int]]]:
    engine = make_llm(folder, backend, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return engine, [list(output.outputs[0].token_ids) for output in outputs]


def same_as_xla(folder, prompts, max_tokens: int, **options) -> LLM:
    engine, tokens = generate(folder, "mosaic", prompts, max_tokens, **options)
    _, expected = generate(folder, "xla", prompts, max_tokens, **options)
    assert tokens == expected
    assert len({tuple(row) for row in tokens}) == len(prompts)
    return engine


def test_a_greedy_batch_of_three(mosaic_folder):
    same_as_xla(mosaic_folder, PROMPTS, 3, max_num_batched_tokens=64)


def test_chunked_prefill(mosaic_folder):
    """A prompt of 40 tokens in two chunks, the second beside a row that decodes."""
    long = [(11 * j) % 290 + 3 for j in range(40)]
    same_as_xla(mosaic_folder, [PROMPTS[0], long], 3, max_num_seqs=2)


def test_preemption(mosaic_folder):
    """Two rows of two blocks each in a pool of three: one is preempted and computed again."""
    prompts = [[(5 * i + 3 * j) % 290 + 3 for j in range(15)] for i in range(2)]
    engine = same_as_xla(mosaic_folder, prompts, 4, num_gpu_blocks_override=4, max_model_len=32, max_num_seqs=2)
    assert engine._core.stats().num_preemptions_total > 0


def test_a_float8_cache(mosaic_folder):
    """A mixed step, then decode: both kernels read what XLA wrote, as XLA's own attention does."""
    same_as_xla(mosaic_folder, PROMPTS[1:2], 2, kv_cache_dtype="fp8")


def test_a_cache_of_another_16_bits_is_refused(mosaic_folder):
    with pytest.raises(ConfigError, match=r"'mosaic' cannot be used: a KV cache of float16: .* bfloat16, or of fp8"):
        make_llm(mosaic_folder, "mosaic", kv_cache_dtype="float16")
