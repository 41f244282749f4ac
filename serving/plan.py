"""``octavo plan``: whether a model fits a GPU and what its steps cost there, without that GPU."""

import argparse
import importlib
import sys
from typing import Any

from ..engine.args import EngineArgs
from ..engine.errors import ConfigError
from ..engine.plan_report import format_plan
from . import flags

FITS, DOES_NOT_FIT = 0, 1
"""Exit codes; wrong usage is 2."""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo plan``, a few of those of ``octavo serve``."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model; without it the default model")
    parser.add_argument(
        "--model", help="folder with a config.json, .gguf file, or a preset: llama-3-8b, qwen2.5-7b, qwen3-0.6b, …"
    )
    parser.add_argument("--target", default="h200", help="GPU: h200, h100 or rtx4090; default: %(default)s")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--max-model-len", type=flags.context_length, help="context in tokens; default: the model's")
    parser.add_argument("--max-num-seqs", type=flags.human_int, help="requests in a step; default: 256")
    parser.add_argument("--max-num-batched-tokens", type=flags.human_int, help="tokens in a step; default: 2048")
    parser.add_argument("--dtype", default="auto", help="auto (bfloat16), bfloat16, float16, float32")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's), fp8, bfloat16, float16, float32")
    parser.add_argument("--block-size", type=flags.human_int, default=16, help="tokens in a KV block")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92, help="share of GPU memory to use")
    parser.add_argument("--swap-space", type=float, default=0.0, help="GiB of host memory per GPU for KV blocks")
    parser.add_argument("--attention-backend", default="auto", help="auto, xla or mosaic")
    parser.add_argument("--quantization", "-q", help="fp8, int8 or int4: as a plain model's weights would be made")
    parser.add_argument("--all-layers", action="store_true", help="compile all layers of a model of more than 32")
    parser.add_argument("--hf-overrides", type=flags.json_object, metavar="JSON", help="entries put over config.json")


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan; 0 if the model fits, 1 if not."""
    if args.model and args.model_tag:
        args.parser.error("the model is given twice: as an argument and as --model")
    options = {name: value for name, value in vars(args).items() if name in EngineArgs.__dataclass_fields__}
    engine_args = EngineArgs(**{**options, "model": args.model or args.model_tag})
    try:
        plan = _load("..engine.plan").make_plan(engine_args, args.target, _say, all_layers=args.all_layers)
    except ConfigError as error:
        args.parser.error(str(error))
    print(format_plan(plan))
    return DOES_NOT_FIT if plan.problem else FITS


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(module: str) -> Any:
    """The planner; this is where jax is imported."""
    return importlib.import_module(module, __package__)
