"""Prometheus metrics under the names and buckets that vLLM's dashboards know, in a registry of our own.

Histograms are recorded as things happen, once per request where they are about requests (rule R26); gauges and token
counters are read from the engine at scrape time. ``kv_cache_usage_perc`` and ``inter_token_latency_seconds`` are also
given under their older names, for dashboards that still ask for those.

Several API processes keep what they record in files that all of them map (the metrics' library does that), and each
adds them up when it is scraped, so it does not matter which one is asked.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from ..engine.messages import FinishReason, StepStats
from ..engine.metrics import FinishedRequest
from .engine_client import EngineConfigView

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)

LABELS = ("model_name", "engine")
_OPENMETRICS = "application/openmetrics-text"
ENGINE_LABEL = "0"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5 times the powers of ten, up to ``limit`` tokens."""
    values = []
    power = 1
    while power <= limit:
        values += [step * power for step in (1, 2, 5) if step * power <= limit]
        power *= 10
    return tuple(values) or (1,)


class ServerMetrics:
    """A ``StatSink``. What comes before ``bind`` (warm-up) is not counted.

    ``shared_folder`` is where several API processes keep what they record, None for a single one; the variable
    PROMETHEUS_MULTIPROC_DIR has to name it when this module is first imported. ``index`` is this process's number,
    ``pids`` are all processes of the server; None is this one.
    """

    def __init__(self, *, shared_folder: str | None = None, index: int = 0, pids: Sequence[int] | None = None) -> None:
        self.registry = CollectorRegistry()
        """What this process records itself."""
        self._scraped = self.registry
        if shared_folder is not None:
            self._scraped = CollectorRegistry()
            MultiProcessCollector(self._scraped, path=shared_folder)
        else:
            GCCollector(registry=self._scraped)
        PlatformCollector(registry=self._scraped)
        self._scraped.register(_ProcessesCollector(pids or (os.getpid(),)))
        self._records_steps = index == 0
        """A step is told to several processes and counted by one."""
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Time until the last byte of an answer.",
            ("handler", "method"),
            buckets=HTTP_BUCKETS,
            registry=self.registry,
        )
        self._series: _RequestSeries | None = None

    def bind(self, config: EngineConfigView, stats: Callable[[], StepStats]) -> None:
        """Makes the model's series, once the engine has started. ``stats`` is called at every scrape."""
        labels = (config.served_model_names[0], ENGINE_LABEL)
        self._scraped.register(_EngineCollector(labels, config, stats))
        self._series = _RequestSeries(self.registry, labels, config.max_model_len)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of a scrape."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith(_OPENMETRICS):
            # Names with a colon need no escapes, but the library makes it an underscore, unless it is told not to.
            encode, _ = choose_encoder(f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8")
        return encode(self._scraped), content_type

    def record_http(self, handler: str, method: str, status: int, duration_s: float) -> None:
        method = method if method in _METHODS else "other"
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_duration.labels(handler, method).observe(duration_s)

    def record_rejection(self, reason: str) -> None:
        """A request that was turned away without being run."""
        if self._series is not None:
            self._series.rejections.labels(*self._series.labels, reason).inc()

    def record_step(self, stats: StepStats) -> None:
        if self._series is not None and self._records_steps:
            self._series.iteration_tokens.observe(stats.num_scheduled_tokens)

    def record_first_token(self, time_to_first_token_s: float) -> None:
        if self._series is not None:
            self._series.time_to_first_token.observe(time_to_first_token_s)

    def record_inter_token(self, gap_s: float) -> None:
        if self._series is not None:
            self._series.inter_token.observe(gap_s)
            self._series.inter_token_old.observe(gap_s)

    def record_finished(self, finished: FinishedRequest) -> None:
        if self._series is not None:
            self._series.record(finished)


class _RequestSeries:
    """The counters and histograms that are recorded, each with its labels already bound."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str], max_model_len: int) -> None:
        self.labels = labels
        self._registry = registry
        tokens = token_buckets(max_model_len)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", TTFT_BUCKETS)
        self.inter_token = self._histogram("inter_token_latency_seconds", TOKEN_GAP_BUCKETS)
        self.inter_token_old = self._histogram("time_per_output_token_seconds", TOKEN_GAP_BUCKETS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", STEP_TOKEN_BUCKETS)
        self.e2e = self._histogram("e2e_request_latency_seconds", LATENCY_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", LATENCY_BUCKETS)
        self.prefill = self._histogram("request_prefill_time_seconds", LATENCY_BUCKETS)
        self.decode = self._histogram("request_decode_time_seconds", LATENCY_BUCKETS)
        self.inference = self._histogram("request_inference_time_seconds", LATENCY_BUCKETS)
        self.per_output_token = self._histogram("request_time_per_output_token_seconds", TOKEN_GAP_BUCKETS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", tokens)
        self.generation_tokens = self._histogram("request_generation_tokens", tokens)
        self.longest_choice = self._histogram("request_max_num_generation_tokens", tokens)
        self.computed_tokens = self._histogram("request_prefill_kv_computed_tokens", tokens)
        self.max_tokens = self._histogram("request_params_max_tokens", tokens)
        self.choices = self._histogram("request_params_n", CHOICE_BUCKETS)
        self.preemptions = self._histogram("request_num_preemptions", PREEMPTION_BUCKETS)
        self.cached_tokens = self._counter("prompt_tokens_cached").labels(*labels)
        self.rejections = self._counter("admission_rejections", "reason")
        self.rejections.labels(*labels, "queue_full")  # there at 0: the first increase of a new series is not seen
        finished = self._counter("request_success", "finished_reason")
        self.finished = {reason: finished.labels(*labels, reason.value) for reason in FinishReason}

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        histogram = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self.labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        text = name.replace("_", " ").capitalize() + "."
        return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self._registry)

    def record(self, finished: FinishedRequest) -> None:
        self.finished[finished.finish_reason].inc()
        self.cached_tokens.inc(finished.num_cached_tokens)
        self.e2e.observe(finished.e2e_latency_s)
        self.queue.observe(finished.queue_time_s)
        self.prompt_tokens.observe(finished.num_prompt_tokens)
        self.generation_tokens.observe(finished.num_generation_tokens)
        self.longest_choice.observe(finished.max_num_generation_tokens)
        self.computed_tokens.observe(finished.num_prompt_tokens - finished.num_cached_tokens)
        self.choices.observe(finished.n)
        self.preemptions.observe(finished.num_preemptions)
        if finished.max_tokens is not None:
            self.max_tokens.observe(finished.max_tokens)
        if finished.time_to_first_token_s is not None:
            self.prefill.observe(finished.prefill_time_s)
            self.decode.observe(finished.decode_time_s)
            self.inference.observe(finished.prefill_time_s + finished.decode_time_s)
        if finished.time_per_output_token_s is not None:
            self.per_output_token.observe(finished.time_per_output_token_s)


_GAUGES = (
    ("num_requests_running", "Requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Requests that wait to run.", "num_waiting"),
    ("kv_cache_usage_perc", "Used share of the KV blocks, 0..1.", "kv_cache_usage"),
    ("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", "kv_cache_usage"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of scheduled requests.", "prompt_tokens_total"),
    ("vllm:generation_tokens", "Generated tokens.", "generation_tokens_total"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits_total"),
    (
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in host memory, since the device did not have them.",
        "external_prefix_cache_queries_total",
    ),
    ("vllm:external_prefix_cache_hits", "Tokens found in host memory.", "external_prefix_cache_hits_total"),
    ("vllm:num_preemptions", "Requests that had to give back their blocks.", "num_preemptions_total"),
    ("octavo:compiles_after_ready", "Step programs compiled while serving.", "compiles_after_ready_total"),
    ("octavo:step_failures", "Steps that failed and whose requests ran again.", "step_failures_total"),
)


class _ProcessesCollector:
    """``process_*`` of all the server's processes: sums, but the least where a sum says nothing."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._collectors = [ProcessCollector(pid=partial(int, pid), registry=None) for pid in pids]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                before = families.setdefault(family.name, family)
                if before is not family:
                    join = min if family.name in ("process_start_time_seconds", "process_max_fds") else sum
                    values = (before.samples[0].value, family.samples[0].value)
                    before.samples[0] = before.samples[0]._replace(value=join(values))
        yield from families.values()


class _EngineCollector:
    """Reads the engine's figures when a scrape asks for them."""

    def __init__(self, labels: tuple[str, str], config: EngineConfigView, stats: Callable[[], StepStats]) -> None:
        self._labels = labels
        self._config = config
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter
        info = {"block_size": self._config.block_size, "num_gpu_blocks": self._config.num_blocks}
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's options.", labels=(*LABELS, *info))
        gauge.add_metric((*self._labels, *map(str, info.values())), 1.0)
        yield gauge
