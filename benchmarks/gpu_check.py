"""What Octavo does on this GPU, in one command of at most seven minutes with nothing compiled beforehand.

    python benchmarks/gpu_check.py [--output gpu.json] [--parts ceilings decode_attention] [--time-limit 420]
    python benchmarks/gpu_check.py --smoke        # the same code at tiny sizes, without a GPU too: measures nothing

Parts, in order of worth: the ceilings that are measured here (copy bandwidth, bfloat16 products); both attention
kernels against attention written the plain way; decode and mixed attention in microseconds, beside plain JAX and
PyTorch; products with packed weights, and those of a mixture's experts; whole decode steps of Llama-3-8B and Qwen2.5-7B
shapes beside their floor; 256 requests through the engine's core, beside a sample of transformers' ``generate``.
Weights are random; no file is read.

Each part runs in a process of its own, which is ended at the part's limit: a part that hangs costs its own figures
and no others. What a part did not use of its time the next ones may. The JSON is rewritten after each part.

Times: a chain of calls that depend on each other is dispatched without waiting, warmed up before; the figure is the
median of several such chains (``gpu/timing.py``). Exit status: 0 if every part that can run here did and kept its
tolerances, else 1. It needs JAX, Flax and NumPy; PyTorch and transformers where the rivals are to be measured.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.parts import PARTS, Part, write_json
from gpu.report import add_fractions, format_table

HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 420.0
LOG_TAIL = 2000
"""Characters of a failed part's output that are kept."""
SMOKE_JOBS = 2
"""Parts side by side with --smoke, which measures nothing: their time goes into imports and compiling, a core each."""
INTERPRETER_THREADS = "6"
"""XLA's threads on a CPU: interpreted kernels wait for ever for threads that are not there."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="write all figures as JSON here, after each part")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for all parts together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--attention-backend", default="auto", choices=("auto", "xla", "mosaic"))
    args = parser.parse_args(argv)
    if not args.time_limit > 0:
        parser.error(f"--time-limit must be positive; got {args.time_limit}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    parts = [part for part in PARTS if (part.name in args.parts if args.parts else part.in_smoke or not args.smoke)]
    document = run_parts(parts, args)
    print(format_table(document))
    return 0 if all(part["status"] in ("ok", "skipped") for part in document["parts"].values()) else 1


def run_parts(parts: Sequence[Part], args: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts one after the other (``SMOKE_JOBS``); the document that is written after each."""
    document: dict[str, Any] = {
        "benchmark": "gpu_check",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "smoke": args.smoke,
        "attention_backend": args.attention_backend,
        "time_limit_s": args.time_limit,
        "python": platform.python_version(),
        "device": None,
        "seconds": 0.0,
        "parts": {},
    }
    began, share = time.monotonic(), args.time_limit / sum(part.limit_s for part in parts)

    def run(part: Part, allowed: float) -> dict[str, Any]:
        limit_s = allowed - (time.monotonic() - began)
        print(f"{part.name} (at most {limit_s:.0f} s) ...", file=sys.stderr, flush=True)
        return run_part(part_command(part, args), limit_s, smoke=args.smoke)

    # What the parts up to each one may take together.
    allowed = itertools.accumulate(part.limit_s * share for part in parts)
    run_all = ThreadPoolExecutor(SMOKE_JOBS).map if args.smoke else map
    outcomes: Iterable[dict[str, Any]] = run_all(run, parts, allowed)
    for part, outcome in zip(parts, outcomes, strict=True):
        if document["device"] is None:
            document["device"] = outcome["device"]
        document["parts"][part.name] = outcome
        document["seconds"] = time.monotonic() - began
        add_fractions(document["parts"])
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.output, document)
        print(f"{part.name}: {outcome['status']} after {outcome['seconds']:.1f} s", file=sys.stderr, flush=True)
    return document


def part_command(part: Part, args: argparse.Namespace) -> list[str]:
    """The command of a part's process; the path of its result is appended."""
    options = ["--attention-backend", args.attention_backend, *(["--smoke"] if args.smoke else [])]
    script = "import sys; from gpu.child import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", script, *options, part.name]


def run_part(command: list[str], limit_s: float, *, smoke: bool = False) -> dict[str, Any]:
    """Runs one part for at most ``limit_s`` seconds and reads what it has written.

    status: "ok", "failed", "timed out" or "skipped"; reason: why, unless ok.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH", "")]))
    if smoke:
        environment.setdefault("NPROC", INTERPRETER_THREADS)
    with tempfile.TemporaryDirectory(prefix="octavo-gpu-check-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, str(result)], stdout=output, stderr=output, env=environment, start_new_session=True
            )
            try:
                returncode: int | None = child.wait(max(limit_s, 0.0))
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                end(child)
        seconds = time.monotonic() - began
        written = read_result(result)
        text = log.read_text(encoding="utf-8", errors="replace")
    outcome = {"status": "ok", "reason": None, "seconds": seconds, "limit_s": limit_s, **written}
    if returncode is None:
        outcome.update(status="timed out", reason=f"stopped at its limit of {limit_s:.1f} s")
    elif returncode != 0:
        outcome.update(status="failed", reason=_failure(returncode, written["figures"]))
    elif outcome["skipped"]:
        outcome.update(status="skipped", reason=outcome["skipped"])
    if outcome["status"] in ("failed", "timed out"):
        outcome["log"] = text[-LOG_TAIL:]
    del outcome["skipped"]
    return outcome


def end(child: subprocess.Popen) -> None:
    """Ends the part and whatever it started; it is the leader of a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def read_result(path: Path) -> dict[str, Any]:
    """What a part has written so far; nothing, if it did not get that far."""
    empty: dict[str, Any] = {"device": None, "figures": [], "skipped": None}
    if not path.is_file():
        return empty
    written = json.loads(path.read_text(encoding="utf-8"))
    return {**empty, **written, "device": written["device"] or None}


def _failure(returncode: int, figures: list[dict[str, Any]]) -> str:
    errors = [figure["error"] for figure in figures if "error" in figure]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return errors[0].splitlines()[0] + more
    return f"its process ended with status {returncode}"


def git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ from it; None where git does not know."""
    try:
        command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
