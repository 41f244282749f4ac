"""``octavo tune``: measures the sizes of a model's kernels on this machine's GPU."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError
from . import flags


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo tune``."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--model", help="folder with a config.json, .gguf file, or a preset: llama-3-8b, qwen2.5-7b, qwen3-0.6b, …"
    )
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--block-size", type=flags.human_int, default=16, help="tokens in a KV block: 16, 32 or 64")
    parser.add_argument("--quantization", "-q", help="as for `octavo serve`: sizes of products with packed weights too")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), help="only for such a KV cache; without it for both kinds"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write here instead of into the package; octavo serve reads it with --tuned-config-folder DIR",
    )


def run_tune(args: argparse.Namespace) -> int:
    """Tunes and prints the files that were written."""
    model = args.model or args.model_tag
    if args.model and args.model_tag:
        args.parser.error("the model is given twice: as an argument and as --model")
    if not model:
        args.parser.error("name the model to tune for: a preset, a folder or a .gguf file")
    try:
        tuner = _load("..engine.tune")
        options = tuner.TuneOptions(
            model,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            block_size=args.block_size,
            dtype=args.dtype,
            tensor_parallel_size=args.tensor_parallel_size,
        )
        paths = tuner.tune(options, output_dir=args.output_dir, progress=_say)
    except (ConfigError, OSError) as error:
        args.parser.error(str(error))
    for path in paths:
        print(path)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(module: str) -> Any:
    """The tuner; this is where jax is imported."""
    return importlib.import_module(module, __package__)
