"""What every adapter speaks with ``peers.py``, over its standard input and output.

The adapter loads the model and writes ``READY {json about the engine}``. Then, for each line
``run WORKLOAD ROUND`` on its standard input, it runs that workload once and writes one JSON line:
``wall_s``, ``output_tokens``, ``ttft_p50_s``, ``ttft_p99_s`` (None where the engine has no batching to measure it
in), or ``error``. It ends at end of file.

Engines print to standard output too, some from child processes: that stream is therefore moved to standard error
first, and the protocol keeps the original for itself.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workloads import WorkItem, read_workload, salt


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. ``ttft_s``: seconds from the start of the run to each request's first token, one per request."""

    wall_s: float
    output_tokens: int
    ttft_s: list[float]


Runner = Callable[[list[WorkItem]], Measured]
"""Runs a workload, all requests submitted at once, greedy, end-of-sequence ignored."""


def claim_stdout() -> TextIO:
    """The original standard output; everything else that writes to it goes to standard error from now on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return stream


def adapter_arguments() -> argparse.Namespace:
    """``--model PATH`` (what the engine loads) and ``--max-model-len N``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder or file that this engine loads")
    parser.add_argument("--max-model-len", type=int, default=2048)
    return parser.parse_args()


def serve(stream: TextIO, about: dict[str, str], run: Runner) -> None:
    """Says READY, then answers each line of standard input until its end."""
    stream.write(f"READY {json.dumps(about)}\n")
    for line in sys.stdin:
        stream.write(json.dumps(_answer(line, run)) + "\n")


def _answer(line: str, run: Runner) -> dict[str, object]:
    try:
        command, workload, round_index = line.split()
        if command != "run":
            raise ValueError(f"unknown command {command!r}")
        items = salt(read_workload(workload), int(round_index))
        measured = run(items)
        expected = sum(item.max_tokens for item in items)
        if measured.output_tokens != expected:
            raise RuntimeError(f"made {measured.output_tokens} tokens where {expected} were asked for")
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    ordered = sorted(measured.ttft_s)
    return {
        "wall_s": measured.wall_s,
        "output_tokens": measured.output_tokens,
        "ttft_p50_s": statistics.median(ordered) if ordered else None,
        "ttft_p99_s": ordered[max(0, -(-len(ordered) * 99 // 100) - 1)] if ordered else None,
    }


def now() -> float:
    """Seconds of the monotonic clock, which all processes of a machine share."""
    return time.monotonic()
