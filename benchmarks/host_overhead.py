"""Host time of one step: schedule, pack and update, over a device that answers at once. No jax in it.

    python benchmarks/host_overhead.py --output host.json

All rows decode, as in a full batch. Like the core's loop, it plans step N+1 before it takes in the tokens of step N.
The figures should not depend on how many requests wait, nor on how long the contexts are.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np

from octavo.engine.buckets import BucketTable
from octavo.engine.input_batch import InputBatch
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.messages import EngineRequest
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.scheduler_output import SampledRows, SchedulerOutput

PARTS = ("schedule", "pack", "update")
VOCAB = 128_000
BLOCK_SIZE = 16
BUDGET = 2048
"""Tokens in a step while the prompts are loaded; the steps that are timed have one a row."""


class Loop:
    """A full batch of ``num_rows`` requests with ``context`` tokens each, and ``num_waiting`` behind them."""

    def __init__(self, num_rows: int, context: int, num_waiting: int, num_steps: int) -> None:
        self.rng = np.random.default_rng(0)
        # The oldest rows already generate while the youngest load their prompts.
        num_output = num_steps + num_rows * context // (BUDGET - num_rows) + num_rows + 8
        max_model_len = context + num_output
        max_blocks = -(-max_model_len // BLOCK_SIZE)
        self.kv = KVCacheManager(num_rows * max_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=num_rows, max_num_batched_tokens=BUDGET, max_model_len=max_model_len
        )
        self.buckets = BucketTable(num_rows, BUDGET)
        self.batch = InputBatch(
            max_num_seqs=num_rows,
            max_model_len=max_model_len,
            max_blocks=max_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB,
        )
        self.tokens = self.rng.integers(VOCAB, size=(64, num_rows), dtype=np.int32)
        """What the device draws, over and over."""
        self.num_steps = 0
        for number in range(num_rows + num_waiting):
            self._add(f"r{number}", context if number < num_rows else min(context, 128), num_output)
        self.unread = self._plan()
        self._pack(self.unread)
        while len(self.scheduler.running) < num_rows or self.unread.num_tokens > num_rows:
            self.turn(lambda: 0)

    def _add(self, request_id: str, context: int, num_output: int) -> None:
        self.scheduler.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=self.rng.integers(VOCAB, size=context).tolist(),
                sampling_params=SamplingParams(max_tokens=num_output, temperature=0.8, top_p=0.95, min_tokens=4),
                arrival_time_s=0.0,
                stop_token_ids=frozenset([VOCAB + 1]),
                eos_token_ids=frozenset([VOCAB + 1]),
            )
        )

    def turn(self, clock: Callable[[], int]) -> list[int]:
        """One turn of the loop; the readings of ``clock`` before, between and after its parts."""
        times = [clock()]
        plan = self._plan()
        times.append(clock())
        self._pack(plan)
        times.append(clock())
        self.scheduler.update(self.unread, self._sample(len(self.unread.rows)))
        times.append(clock())
        self.unread = plan
        return times

    def _plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(ahead=self.num_steps > 0)
        assert plan is not None
        self.num_steps += 1
        return plan

    def _pack(self, plan: SchedulerOutput) -> np.ndarray:
        for row in plan.rows:
            if row.admitted:
                self.batch.row_update(row)
        bucket = self.buckets.select(plan.num_tokens, len(plan.rows), decode_only=plan.decode_only)
        return self.batch.pack(plan, bucket)

    def _sample(self, count: int) -> SampledRows:
        token_ids = self.tokens[self.num_steps % len(self.tokens), :count]
        zeros = np.zeros((count, 20), np.int32)
        return SampledRows(
            token_ids=token_ids,
            finite=np.ones(count, bool),
            logprobs=np.zeros(count, np.float32),
            ranks=np.ones(count, np.int32),
            top_token_ids=zeros,
            top_logprobs=zeros.view(np.float32),
        )


def summary(times_ms: list[float]) -> dict[str, float]:
    """Median, smallest, 90th percentile and spread (90th less 10th percentile, over the median)."""
    tenths = statistics.quantiles(times_ms, n=10)
    median = statistics.median(times_ms)
    return {
        "median_ms": median,
        "min_ms": min(times_ms),
        "p90_ms": tenths[-1],
        "spread": (tenths[-1] - tenths[0]) / median,
    }


def measure(loop: Loop, num_steps: int) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """For each part and the total: wall time, and time on the processor, which neighbours disturb less."""
    clocks = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
    results: dict[str, dict[str, dict[str, float]]] = {part: {} for part in (*PARTS, "total")}
    for name, clock in clocks.items():
        readings = np.array([loop.turn(clock) for _ in range(num_steps)]) / 1e6
        parts = np.diff(readings, axis=1)
        for place, part in enumerate(PARTS):
            results[part][name] = summary(parts[:, place].tolist())
        results["total"][name] = summary(parts.sum(axis=1).tolist())
    yield from results.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 10000], help="queued requests")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 8192], help="tokens of each running request")
    parser.add_argument("--steps", type=int, default=400, help="steps timed, once by each clock")
    parser.add_argument("--output", type=Path, help="a file for the results as JSON")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {options.rows} rows")
    print("smallest and median ms on the processor (spread); the last column is the total in wall time")
    print(f"{'waiting':>8} {'context':>8} " + " ".join(f"{name:>19}" for name in (*PARTS, "total", "wall")))
    results = []
    for num_waiting, context in product(options.waiting, options.context):
        loop = Loop(options.rows, context, num_waiting, 2 * options.steps)
        gc.collect()
        gc.freeze()  # as the core's process does when it has started
        parts = dict(measure(loop, options.steps))
        results.append({"rows": options.rows, "waiting": num_waiting, "context": context, **parts})
        cells = [parts[part]["cpu"] for part in (*PARTS, "total")] + [parts["total"]["wall"]]
        texts = [f"{cell['min_ms']:.3f} {cell['median_ms']:.3f} ({cell['spread']:.0%})" for cell in cells]
        print(f"{num_waiting:>8} {context:>8} " + " ".join(f"{text:>19}" for text in texts), flush=True)
        gc.unfreeze()
    if options.output:
        options.output.write_text(json.dumps({"python": platform.python_version(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
