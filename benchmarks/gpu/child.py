"""What the process of one part does."""

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from . import device
from .parts import PARTS, Options, Report, SkipPart, short


def main(argv: list[str]) -> int:
    """``PART RESULT [--smoke] [--attention-backend B]``; 0, or 1 if the part or one of its figures failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("result", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--attention-backend", default="auto")
    args = parser.parse_args(argv)
    part = next(part for part in PARTS if part.name == args.part)
    report = Report(args.result)
    report.write()
    if absent := _first_absent(part.needs):
        report.skipped = f"{absent} is not installed"
        report.write()
        return 0
    device.ensure_octavo()
    try:
        report.device = device.torch_device() if part.needs else device.jax_device()
        report.write()
        if report.device["platform"] != "gpu" and not args.smoke:
            if part.needs:
                raise SkipPart("the installed PyTorch has no GPU")
            raise RuntimeError(f"no GPU: this process computes on {report.device['platform']}; --smoke tries the code")
        module = importlib.import_module(f"{__package__}.{part.module}")
        module.run(report, Options(args.smoke, args.attention_backend, part.arguments))
    except SkipPart as reason:
        report.skipped = str(reason)
        report.write()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report.add(part.name, error=short(error))
    return 1 if report.failed else 0


def _first_absent(packages: tuple[str, ...]) -> str | None:
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError:
            return name
    return None
