"""``LLM`` over a tiny model, with the sizes whose compiled programs many tests share."""

from pathlib import Path

from conftest_paths import CACHE_FOLDER

from octavo import LLM


def make_llm(folder: Path, **options) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "compile_cache_dir": str(CACHE_FOLDER / "engine"),
        "block_size": 4,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 200,
    }
    return LLM(str(folder), **{**defaults, **options})
