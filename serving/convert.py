"""``octavo convert``: writes a model as an Orbax checkpoint."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..engine.config import DTYPES, ModelOptions
from ..engine.errors import ConfigError
from .termination import ends_cleanly


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo convert``."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model", help="folder, .gguf file or hub id; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--quantization", "-q", help="as the checkpoint says, if not given; fp8, int8 or int4 for plain weights"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=tuple(DTYPES), help="of what is not quantised; default: as config.json says"
    )
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "orbax"))
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--download-dir", help="folder for files from the hub")


def run_convert(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says what was written."""
    if args.model and args.model_tag:
        args.parser.error("the model is given twice: as an argument and as --model")
    options = ModelOptions(
        args.model or args.model_tag,
        revision=args.revision,
        download_dir=args.download_dir,
        load_format=args.load_format,
        dtype=DTYPES[args.dtype],
        quantization=args.quantization,
    )
    try:
        with ends_cleanly():
            written = _load("..engine.convert").convert(options, args.output, _say)
    except ConfigError as error:
        args.parser.error(str(error))
    print(f"{written.folder}: {written.num_arrays} arrays, {written.num_bytes / 2**20:.1f} MiB")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(module: str) -> Any:
    """The converter; this is where jax is imported."""
    return importlib.import_module(module, __package__)
