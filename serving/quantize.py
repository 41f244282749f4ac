"""``octavo quantize``: writes a plain model as an AWQ, GPTQ or FP8 checkpoint."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..engine.config import ModelOptions
from ..engine.errors import ConfigError
from .termination import ends_cleanly

_CALIBRATED = ("awq", "gptq")


def add_quantize_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo quantize``."""
    parser.add_argument("model", metavar="MODEL", help="folder with plain safetensors weights, or hub id")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to write, new or empty")
    parser.add_argument(
        "--method",
        required=True,
        choices=("awq", "gptq", "fp8"),
        help="awq: 4 bits, activation-aware; gptq: 4 or 8 bits, errors compensated; fp8: e4m3, dynamic activations",
    )
    parser.add_argument("--calibration-file", type=Path, metavar="FILE", help="UTF-8 text; awq and gptq need it")
    parser.add_argument("--num-samples", type=positive, metavar="N", help="samples of that text; default: 128")
    parser.add_argument("--sample-length", type=positive, metavar="N", help="tokens of a sample; default: 512")
    parser.add_argument(
        "--round-to-nearest", action="store_true", help="awq, gptq: only round each weight, without calibration"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="awq, gptq: input columns that share a scale; 32, 64 or 128 (default)",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8), help="gptq: bits of a weight; default: 4")
    parser.add_argument("--asymmetric", action="store_true", help="gptq: with zero points; awq always has them")
    parser.add_argument(
        "--damping", type=float, metavar="X", help="gptq: added to the diagonal, of its mean; default: 0.01"
    )
    parser.add_argument(
        "--scales",
        choices=("channel", "tensor"),
        help="fp8: one for each output row (default), or for the whole weight",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--download-dir", help="folder for files from the hub")


def positive(text: str) -> int:
    """An option's whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def run_quantize(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says what was written."""
    for sentence in _contradictions(args):
        args.parser.error(sentence)
    model = ModelOptions(args.model, revision=args.revision, download_dir=args.download_dir)
    try:
        options = _options(args)
        with ends_cleanly():
            written = _load("..engine.quantize").quantize(model, options, args.output, _say)
    except ConfigError as error:
        args.parser.error(str(error))
    mib = [size / 2**20 for size in (written.bytes_before, written.bytes_after)]
    print(
        f"{written.folder}: {written.num_linears} linear layers of {written.num_layers} decoder layers quantised "
        f"({args.method}); {mib[0]:.1f} MiB before, {mib[1]:.1f} MiB after"
    )
    return 0


def _contradictions(args: argparse.Namespace) -> list[str]:
    """What was asked for and does not go together."""
    found = []
    only = {"bits": ("gptq",), "damping": ("gptq",), "group_size": _CALIBRATED, "scales": ("fp8",)}
    given = [name for name in only if getattr(args, name) is not None]
    only |= {"asymmetric": ("gptq",), "round_to_nearest": _CALIBRATED, "calibration_file": _CALIBRATED}
    given += [name for name in ("asymmetric", "round_to_nearest", "calibration_file") if getattr(args, name)]
    for name in given:
        if args.method not in only[name]:
            found.append(f"--{name.replace('_', '-')} is for {' and '.join(only[name])}, not for {args.method}")
    for name in ("num_samples", "sample_length", "damping"):
        if getattr(args, name) is not None and args.calibration_file is None:
            found.append(f"--{name.replace('_', '-')} goes with --calibration-file")
    if args.method in _CALIBRATED and (args.calibration_file is None) != args.round_to_nearest:
        found.append(f"{args.method} takes either --calibration-file FILE or --round-to-nearest")
    if args.group_size not in (None, 32, 64, 128):
        found.append(f"--group-size is 32, 64 or 128, not {args.group_size}")
    if args.damping is not None and not 0 < args.damping < 1:
        found.append(f"--damping is between 0 and 1, not {args.damping}")
    return found


def _options(args: argparse.Namespace) -> Any:
    samples = None
    if args.calibration_file is not None:
        numbers = (args.num_samples or 128, args.sample_length or 512)
        samples = _load("..engine.calibration").Samples(args.calibration_file, *numbers)
    return _load("..engine.quantize").QuantizeOptions(
        method=args.method,
        samples=samples,
        bits=args.bits or 4,
        group_size=args.group_size or 128,
        symmetric=not args.asymmetric,
        damping=0.01 if args.damping is None else args.damping,
        per_channel=args.scales != "tensor",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(module: str) -> Any:
    """The quantiser; this is where jax is imported."""
    return importlib.import_module(module, __package__)
