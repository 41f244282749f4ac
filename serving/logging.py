"""Log lines: set-up, one line per finished request, and the periodic statistics line that vLLM's users know."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from ..engine.messages import StepStats
from ..engine.metrics import FinishedRequest, StatSink

logger = logging.getLogger(__name__)

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
LEVELS = ("debug", "info", "warning", "error", "critical")


def set_up_logging(level: str) -> None:
    """Lines of this package at ``level``, of others at warning or above, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger(__name__.split(".")[0]).setLevel(level.upper())


class RequestLog:
    """A ``StatSink`` that writes one line per finished request and passes everything on."""

    def __init__(self, sink: StatSink) -> None:
        self._sink = sink
        self.record_step = sink.record_step
        self.record_first_token = sink.record_first_token
        self.record_inter_token = sink.record_inter_token

    def record_finished(self, finished: FinishedRequest) -> None:
        self._sink.record_finished(finished)
        first = finished.time_to_first_token_s
        logger.info(
            "finished %s: %s, %d prompt tokens (%d cached), %d generated, queue %.3f s, first token %s, total %.3f s",
            finished.request_id,
            finished.finish_reason.value,
            finished.num_prompt_tokens,
            finished.num_cached_tokens,
            finished.num_generation_tokens,
            finished.queue_time_s,
            "none" if first is None else f"{first:.3f} s",
            finished.e2e_latency_s,
        )


class StatsLine:
    """Makes the statistics line from the difference of two readings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: StepStats | None = None
        self._last_time_s = 0.0
        self._was_idle = True

    def next_line(self, stats: StepStats) -> str | None:
        """None while nothing happens; one last line is given after work has ended."""
        now_s = self._clock()
        last, elapsed_s = self._last, now_s - self._last_time_s
        self._last, self._last_time_s = stats, now_s
        if last is None or elapsed_s <= 0:
            return None
        prompt = (stats.prompt_tokens_total - last.prompt_tokens_total) / elapsed_s
        generated = (stats.generation_tokens_total - last.generation_tokens_total) / elapsed_s
        idle = not (prompt or generated or stats.num_running or stats.num_waiting)
        silent = idle and self._was_idle
        self._was_idle = idle
        if silent:
            return None
        queries, hits = stats.prefix_cache_queries_total, stats.prefix_cache_hits_total
        hit_rate = 100.0 * hits / queries if queries else 0.0
        host_queries, host_hits = stats.external_prefix_cache_queries_total, stats.external_prefix_cache_hits_total
        host_rate = f", External prefix cache hit rate: {100.0 * host_hits / host_queries:.1f}%" if host_queries else ""
        return (
            f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generated:.1f} tokens/s, Running: {stats.num_running} reqs, "
            f"Waiting: {stats.num_waiting} reqs, GPU KV cache usage: {100.0 * stats.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {hit_rate:.1f}%{host_rate}"
        )


async def log_stats_forever(stats: Callable[[], StepStats | None], interval_s: float) -> None:
    """Writes the statistics line every ``interval_s`` seconds until cancelled."""
    line = StatsLine()
    while True:
        reading = stats()
        text = line.next_line(reading) if reading is not None else None
        if text:
            logger.info("%s", text)
        await asyncio.sleep(interval_s)
