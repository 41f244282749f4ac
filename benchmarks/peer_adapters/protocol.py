"""What every adapter speaks with ``peers.py``, over its standard input and output.

The adapter loads the model and writes ``READY {json about the engine}``. Then, for each line
``run WORKLOAD ROUND`` on its standard input, it runs that workload once and writes one JSON line:
``wall_s``, ``output_tokens``, ``ttft_p50_s``, ``ttft_p99_s`` (null where the engine does not tell), ``output_ids``; or
``error``. It ends at end of file.

Engines print to standard output too, some from child processes: that stream is therefore moved to standard error
first, and the protocol keeps the original for itself.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from latency import percentile
from workloads import WorkItem, read_workload, salt


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: output ids of every request, in order; ``ttft_s`` are seconds from the start of the run to each
    request's first token, or empty where the engine does not tell.
    """

    wall_s: float
    output_ids: list[list[int]]
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
        for item, ids in zip(items, measured.output_ids, strict=True):
            if len(ids) != item.max_tokens:
                raise RuntimeError(f"made {len(ids)} tokens where {item.max_tokens} were asked for")
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "wall_s": measured.wall_s,
        "output_tokens": sum(len(ids) for ids in measured.output_ids),
        "ttft_p50_s": percentile(measured.ttft_s, 50) if measured.ttft_s else None,
        "ttft_p99_s": percentile(measured.ttft_s, 99) if measured.ttft_s else None,
        "output_ids": measured.output_ids,
    }


def now() -> float:
    """Seconds of the monotonic clock, which all processes of a machine share."""
    return time.monotonic()
