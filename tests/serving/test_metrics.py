"""Metrics: exact values after known traffic, names and buckets; and the log lines."""

import asyncio
import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import StepStats
from octavo.serving.logging import StatsLine
from octavo.serving.metrics import LATENCY_BUCKETS, TTFT_BUCKETS, token_buckets


async def scrape(running) -> dict[tuple[str, ...], float]:
    """(sample name, values of labels other than model and engine) -> value."""
    async with running.http.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "perm"
                assert sample.labels["engine"] == "0"
            rest = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            samples[(sample.name, *(rest[name] for name in sorted(rest)))] = sample.value
    return samples


async def test_finished_requests_are_counted_once(running):
    before = await scrape(running)
    assert before["vllm:request_success_total", "stop"] == 0
    for max_tokens in (1, 2, 5):
        await running.post("/v1/completions", {"prompt": [97, 98], "max_tokens": max_tokens})
    await running.post("/v1/completions", {"prompt": [97], "max_tokens": 9, "stop": "cd"})
    after = await scrape(running)
    assert after["vllm:request_success_total", "length"] == 3
    assert after["vllm:request_success_total", "stop"] == 1
    assert after["vllm:request_success_total", "abort"] == 0
    assert after["vllm:request_success_total", "error"] == 0
    assert after["vllm:e2e_request_latency_seconds_count",] == 4
    assert after["vllm:time_to_first_token_seconds_count",] == 4
    assert after["vllm:time_to_first_token_seconds_sum",] > 0
    assert after["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 4
    assert after["vllm:request_prompt_tokens_sum",] == 7
    assert after["vllm:request_generation_tokens_sum",] == 1 + 2 + 5 + 3
    assert after["vllm:request_max_num_generation_tokens_sum",] == 1 + 2 + 5 + 3
    assert after["vllm:request_params_max_tokens_sum",] == 1 + 2 + 5 + 9
    assert after["vllm:request_time_per_output_token_seconds_count",] == 3
    assert after["vllm:prompt_tokens_total",] == 7
    assert after["vllm:generation_tokens_total",] == 11
    assert after["vllm:prompt_tokens_cached_total",] == 4
    assert after["vllm:request_prefill_kv_computed_tokens_sum",] == 3


async def test_aborts_are_counted(launch):
    running = await launch(step_s=0.01)
    tasks = [asyncio.create_task(running.post("/v1/completions", {"prompt": "a", "max_tokens": 60})) for _ in range(5)]
    while len(running.engine.open) < 5:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.005)
    assert (await scrape(running))["vllm:num_requests_running",] == 5
    for task in tasks:
        task.cancel()
    while running.engine.open:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.005)
    after = await scrape(running)
    assert after["vllm:request_success_total", "abort"] == 5
    assert after["vllm:num_requests_running",] == 0
    assert after["http_requests_total", "/v1/completions", "POST", "499"] == 5


async def test_gauges_are_of_the_moment_of_the_scrape(running):
    running.engine.totals = StepStats(
        num_waiting=3,
        kv_cache_usage=0.25,
        prefix_cache_queries_total=40,
        prefix_cache_hits_total=16,
        external_prefix_cache_queries_total=24,
        external_prefix_cache_hits_total=8,
    )
    samples = await scrape(running)
    assert samples["vllm:num_requests_waiting",] == 3
    assert samples["vllm:kv_cache_usage_perc",] == samples["vllm:gpu_cache_usage_perc",] == 0.25
    assert samples["vllm:prefix_cache_queries_total",] == 40
    assert samples["vllm:prefix_cache_hits_total",] == 16
    assert samples["vllm:external_prefix_cache_queries_total",] == 24
    assert samples["vllm:external_prefix_cache_hits_total",] == 8
    assert samples["vllm:cache_config_info", "16", "100"] == 1


async def test_recorded_gaps_and_steps(running):
    metrics = running.server.metrics
    metrics.record_inter_token(0.03)
    metrics.record_step(StepStats(num_scheduled_tokens=33))
    samples = await scrape(running)
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert samples[f"vllm:{name}_count",] == 1
        assert samples[f"vllm:{name}_bucket", "0.025"] == 0
        assert samples[f"vllm:{name}_bucket", "0.05"] == 1
    assert samples["vllm:iteration_tokens_total_bucket", "32.0"] == 0
    assert samples["vllm:iteration_tokens_total_bucket", "64.0"] == 1


async def test_nothing_before_ready_is_counted(launch):
    running = await launch(ready=False)
    running.server.metrics.record_first_token(1.0)
    running.server.metrics.record_step(StepStats(num_scheduled_tokens=512))
    assert not [key for key in await scrape(running) if key[0].startswith("vllm:")]
    await running.server.start_engine()
    assert (await scrape(running))["vllm:time_to_first_token_seconds_count",] == 0


async def test_process_and_http_metrics(running):
    async with running.http.get("/nowhere/at/all"):
        pass
    samples = await scrape(running)
    assert samples["process_resident_memory_bytes",] > 0
    assert samples["http_requests_total", "none", "GET", "404"] == 1
    assert not any("nowhere" in key for name in samples for key in name), "a client must not make series"


async def test_two_servers_do_not_share_figures(launch):
    first, second = await launch(), await launch()
    await first.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert (await scrape(first))["vllm:request_success_total", "length"] == 1
    assert (await scrape(second))["vllm:request_success_total", "length"] == 0


async def test_openmetrics_on_demand(running):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with running.http.get("/metrics", headers=headers) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


ACCEPTS = {
    "Prometheus 2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.3",
    "Prometheus 3, old names": "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,*/*;q=0.3",
    "no version": "application/openmetrics-text",
    "text": "text/plain;version=1.0.0",
    "curl": "*/*",
}


@pytest.mark.parametrize("who", ACCEPTS)
async def test_names_keep_their_colon(running, who):
    """However a scraper asks: dashboards and alerts ask for ``vllm:``."""
    async with running.http.get("/metrics", headers={"Accept": ACCEPTS[who]}) as response:
        lines = (await response.text()).splitlines()
    names = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    assert {"vllm:num_requests_running", "vllm:generation_tokens_total", "octavo:step_failures_total"} <= names
    assert "vllm:e2e_request_latency_seconds_bucket" in names
    assert not any(name.startswith(("vllm_", "octavo_")) for name in names)


def test_buckets():
    assert token_buckets(64) == (1, 2, 5, 10, 20, 50)
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(1) == (1,)
    assert (TTFT_BUCKETS[0], TTFT_BUCKETS[-1], len(TTFT_BUCKETS)) == (0.001, 2560.0, 22)
    assert (LATENCY_BUCKETS[0], LATENCY_BUCKETS[-1], len(LATENCY_BUCKETS)) == (0.3, 7680.0, 21)


async def test_a_line_per_request(running, caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        await running.post("/v1/completions", {"prompt": [97], "max_tokens": 3})
    lines = [record.message for record in caplog.records if "finished" in record.message]
    assert len(lines) == 1
    assert "length, 1 prompt tokens (1 cached), 3 generated" in lines[0]


def test_statistics_line():
    times = iter([0.0, 10.0, 20.0, 30.0])
    line = StatsLine(lambda: next(times))
    assert line.next_line(StepStats()) is None
    busy = StepStats(
        prompt_tokens_total=1000,
        generation_tokens_total=255,
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.125,
        prefix_cache_queries_total=200,
        prefix_cache_hits_total=50,
    )
    assert line.next_line(busy) == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 25.5 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    host = replace(
        busy, generation_tokens_total=300, external_prefix_cache_queries_total=150, external_prefix_cache_hits_total=90
    )
    tiered = StatsLine(iter([0.0, 10.0]).__next__)
    tiered.next_line(busy)
    assert tiered.next_line(host).endswith("Prefix cache hit rate: 25.0%, External prefix cache hit rate: 60.0%")
    idle = StepStats(prompt_tokens_total=1000, generation_tokens_total=255)
    assert line.next_line(idle) is not None, "one last line says that it is over"
    assert line.next_line(idle) is None


@pytest.mark.parametrize("disabled", [True, False])
async def test_log_stats_can_be_switched_off(launch, caplog, disabled):
    running = await launch(disable_log_stats=disabled)
    with caplog.at_level(logging.INFO, logger="octavo"):
        await running.post("/v1/completions", {"prompt": [97], "max_tokens": 3})
    assert any("finished" in record.message for record in caplog.records) is not disabled
    assert (await scrape(running))["vllm:request_success_total", "length"] == 1, "metrics are always counted"
