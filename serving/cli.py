"""The ``octavo`` command. Importing it imports neither jax nor a web framework, so that ``--help`` is quick."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..engine.errors import ConfigError
from . import client, convert, flags, plan, quantize, tune
from .logging import logger, set_up_logging

SERVER_KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")
DEV_MODE_VARIABLES = ("OCTAVO_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
CLIENT_KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (2: wrong usage)."""
    parser = make_parser()
    args = parser.parse_args(flags.normalise_names(sys.argv[1:] if argv is None else argv))
    return args.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``args.run`` of its result is the command."""
    parser = argparse.ArgumentParser(prog="octavo", description="LLM inference in JAX", allow_abbrev=False)
    parser.add_argument("--version", "-v", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    tuning = "measure the kernels' sizes on this machine's GPU"
    of_models = (
        ("serve", "[options]", "serve a model over OpenAI's API", flags.add_serve_options, run_serve),
        ("plan", "[options]", "what a model takes on a GPU, without that GPU", plan.add_plan_options, plan.run_plan),
        ("tune", "[options]", tuning, tune.add_tune_options, tune.run_tune),
        (
            "convert",
            "--output DIR [options]",
            "write a model as an Orbax checkpoint",
            convert.add_convert_options,
            convert.run_convert,
        ),
        (
            "quantize",
            "OUTPUT --method METHOD [options]",
            "write a plain model as an AWQ, GPTQ or FP8 checkpoint",
            quantize.add_quantize_options,
            quantize.run_quantize,
        ),
    )
    for name, options, summary, add_options, run in of_models:
        usage = f"octavo {name} {'MODEL' if name == 'quantize' else '[MODEL]'} {options}"
        command = commands.add_parser(name, help=summary, usage=usage, allow_abbrev=False)
        add_options(command)
        command.set_defaults(run=run, parser=command)
    chat = commands.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    chat.add_argument("--system-prompt", help="a first message of the system")
    _add_client_options(chat)
    chat.set_defaults(run=run_chat)
    complete = commands.add_parser("complete", help="continue texts with a running server", allow_abbrev=False)
    _add_client_options(complete)
    complete.set_defaults(run=run_complete)
    return parser


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="one text; without it lines are read until end of file")
    parser.add_argument("--quick", "-q", metavar="TEXT", help="the same as giving the text")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="default: %(default)s")
    parser.add_argument("--model", "--model-name", help="default: the first that the server lists")
    parser.add_argument("--api-key", help=f"or the variable {CLIENT_KEY_VARIABLES[0]}")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)


def run_serve(args: argparse.Namespace) -> int:
    """Checks the options and serves until stopped."""
    for sentence in flags.refused_options(args):
        args.parser.error(sentence)
    set_up_logging(args.log_level)
    for sentence in flags.removed_options(args):
        logger.warning("%s", sentence)
    try:
        engine_args = flags.engine_args(args)
        options = flags.server_options(args, _keys(SERVER_KEY_VARIABLES), dev_mode=_keys(DEV_MODE_VARIABLES) == ["1"])
        _load("..engine.config").EngineConfig.from_args(engine_args)
    except (ConfigError, ValueError) as error:
        args.parser.error(str(error))
    return _load(".supervisor").run_supervisor(engine_args, options, args.log_level)


def run_chat(args: argparse.Namespace) -> int:
    return client.chat(_client(args), args.model, _sampling(args), args.system_prompt, args.quick or args.text)


def run_complete(args: argparse.Namespace) -> int:
    return client.complete(_client(args), args.model, _sampling(args), args.quick or args.text)


def _client(args: argparse.Namespace) -> client.Client:
    return client.Client(url=args.url, api_key=args.api_key or next(iter(_keys(CLIENT_KEY_VARIABLES)), None))


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _keys(variables: Sequence[str]) -> list[str]:
    """Keys of the first variable that is set and not empty."""
    values = [os.environ.get(name, "") for name in variables]
    return [value for value in values if value][:1]


def _load(module: str) -> Any:
    """A module of this package that is too heavy to import for ``--help``."""
    return importlib.import_module(module, __package__)
