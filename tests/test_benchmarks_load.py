"""The load generators: datasets, arrival times, percentiles, and the client against a server that we can predict."""

import argparse
import asyncio
import importlib
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
client = importlib.import_module("client")
latency = importlib.import_module("latency")
serving = importlib.import_module("serving")
workloads = importlib.import_module("workloads")

FIRST_TOKEN_S = 0.08
GAP_S = 0.02


@pytest.mark.parametrize("p", [0, 1, 50, 90, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(p: float, count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    assert latency.percentile(values, p) == pytest.approx(float(np.percentile(values, p)), rel=1e-12)


def test_a_summary_has_the_usual_keys_in_milliseconds() -> None:
    values = [0.1, 0.2, 0.6]
    figures = latency.summarise_ms("ttft", values, [90, 99.9])
    assert set(figures) == {"mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p90_ttft_ms", "p99.9_ttft_ms"}
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(float(np.std(values)) * 1e3)
    assert figures["p90_ttft_ms"] == pytest.approx(520)
    assert latency.summarise_ms("ttft", [], [99]) == {}


@pytest.mark.parametrize(("values", "p"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_bad_percentiles_are_refused(values: list[float], p: float) -> None:
    with pytest.raises(ValueError):
        latency.percentile(values, p)


def test_spread_is_the_range_over_the_median() -> None:
    assert latency.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens"),
    [("single", 1, 128, 128), ("batch", 64, 5777, 3814), ("shared_prefix", 32, 17408, 1024)],
)
def test_shipped_workloads(name: str, requests: int, prompt_tokens: int, output_tokens: int) -> None:
    items = workloads.read_workload(name)
    assert len(items) == requests
    assert sum(len(item.prompt_ids) for item in items) == prompt_tokens
    assert sum(item.max_tokens for item in items) == output_tokens
    assert all(item.prompt for item in items)


def test_the_shared_prefix_is_shared_and_stays_so_when_salted() -> None:
    items = workloads.read_workload("shared_prefix")
    salted = workloads.salt(items, 3)
    for group in (items, salted):
        assert len({tuple(item.prompt_ids[:512]) for item in group}) == 1
        assert len({tuple(item.prompt_ids[512:]) for item in group}) == 32
    assert items[0].prompt_ids[0] != salted[0].prompt_ids[0]
    assert items[0].prompt_ids[1:] == salted[0].prompt_ids[1:]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_no_two_rounds_share_a_first_block(name: str) -> None:
    items = workloads.read_workload(name)
    rounds = [workloads.salt(items, index) for index in (workloads.WARM_UP_ROUND, 0, 1, 2, 3)]
    firsts = [{item.prompt_ids[0] for item in group} for group in rounds]
    assert all(not a & b for i, a in enumerate(firsts) for b in firsts[:i])
    ids = {token_id for item in items for token_id in item.prompt_ids}
    assert all(first <= ids for first in firsts)


def test_too_many_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="round 2"):
        workloads.salt([workloads.WorkItem([5, 6, 7], 1)], 2)


def test_a_limit_starts_over() -> None:
    items = workloads.read_workload("single", 3)
    assert [item.prompt_ids for item in items] == [items[0].prompt_ids] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"prompt_ids": [], "max_tokens": 1}', "prompt_ids"),
        ('{"prompt_ids": [1, -2], "max_tokens": 1}', "prompt_ids"),
        ('{"prompt_ids": [1], "max_tokens": 0}', "max_tokens"),
        ('{"prompt_ids": [1]}', "max_tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt_ids": [1], "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"load\.jsonl:2: .*{message}"):
        workloads.read_workload(str(path))


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="nonsense"):
        workloads.read_workload("nonsense")


def test_random_workloads_repeat_with_their_seed_and_keep_their_sizes() -> None:
    spec = workloads.RandomSpec(input_len=20, output_len=10, range_ratio=0.5, prefix_len=4, vocab_size=50)
    items = workloads.random_workload(spec, 200, seed=1)
    assert items == workloads.random_workload(spec, 200, seed=1)
    assert items != workloads.random_workload(spec, 200, seed=2)
    assert len({tuple(item.prompt_ids[:4]) for item in items}) == 1
    assert {len(item.prompt_ids) - 4 for item in items} == set(range(10, 31))
    assert {item.max_tokens for item in items} == set(range(5, 16))
    assert all(0 <= token_id < 50 for item in items for token_id in item.prompt_ids)


def test_bad_random_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="output_len"):
        workloads.random_workload(workloads.RandomSpec(output_len=0), 1, 0)
    with pytest.raises(ValueError, match="range_ratio"):
        workloads.random_workload(workloads.RandomSpec(range_ratio=1.0), 1, 0)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = serving.arrival_times_s(20_000, 8.0, burstiness, np.random.default_rng(0))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    # A gamma distribution of shape k has a variance of mean^2 / k: 1 is Poisson arrivals.
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert serving.arrival_times_s(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_bad_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError):
        serving.arrival_times_s(1, rate, burstiness, np.random.default_rng(0))


class FakeServer:
    """An OpenAI-compatible stream whose times are known; splits every line in two writes, as networks do."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.fail_in_stream = False
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        self.server = TestServer(app)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != "fake":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body)
        finally:
            self.in_flight -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict) -> None:
        chat = "messages" in body
        if chat:
            await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = body["max_completion_tokens" if chat else "max_tokens"]
        for index in range(count):
            await asyncio.sleep(GAP_S if index else FIRST_TOKEN_S)
            if self.fail_in_stream and index == 1:
                await self._send(response, {"error": {"message": "engine died"}})
                return
            choice = {"delta": {"content": "x"}} if chat else {"text": "x" if index else ""}
            await self._send(response, {"choices": [choice | {"finish_reason": None}]})
        end = {"delta": {}} if chat else {"text": ""}
        await self._send(response, {"choices": [end | {"finish_reason": "length"}]})
        await self._send(response, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")

    @staticmethod
    async def _send(response: web.StreamResponse, chunk: dict) -> None:
        line = f"data: {json.dumps(chunk)}\n\n".encode()
        await response.write(line[:9])
        await asyncio.sleep(0)
        await response.write(line[9:])


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    await server.server.start_server()
    yield server
    await server.server.close()


def arguments(fake: FakeServer, *more: str) -> argparse.Namespace:
    return serving.parse_arguments(["--base-url", str(fake.server.make_url("")), *more])


RANDOM = ("--random-output-len", "5", "--random-input-len", "7")


async def test_closed_loop_counts_and_times(fake: FakeServer) -> None:
    figures = await serving.benchmark(arguments(fake, *RANDOM, "--num-prompts", "6", "--max-concurrency", "2"))
    assert fake.most_in_flight == 2
    assert figures["max_concurrent_requests"] == 2
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (42, 30)
    assert figures["output_throughput"] == pytest.approx(30 / figures["duration"])
    assert figures["total_token_throughput"] == pytest.approx(72 / figures["duration"])
    # Sleeps never end early; how late they end depends on the machine, so only floors are checked here.
    assert figures["duration"] >= 3 * (FIRST_TOKEN_S + 4 * GAP_S)
    assert figures["median_ttft_ms"] >= FIRST_TOKEN_S * 1e3
    assert figures["median_e2el_ms"] >= (FIRST_TOKEN_S + 4 * GAP_S) * 1e3


def test_figures_of_known_times() -> None:
    def timed(ttft_s: float, gaps_s: list[float], output_tokens: int) -> object:
        latency_s = ttft_s + sum(gaps_s)
        return client.Timed(True, ttft_s, latency_s, gaps_s, prompt_tokens=10, output_tokens=output_tokens)

    results = [timed(0.1, [0.02, 0.04], 3), timed(0.3, [0.05], 3), timed(0.2, [], 1), client.Timed(error="no")]
    figures = serving.compute_metrics(results, 2.0, serving.METRICS, [50])
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 7)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.5, 3.5)
    assert figures["total_token_throughput"] == 18.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    # Two tokens in one chunk are one gap, but two tokens of the mean time per output token.
    assert figures["mean_tpot_ms"] == pytest.approx((30 + 25) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((20 + 40 + 50) / 3)
    assert figures["p50_e2el_ms"] == pytest.approx(200)
    assert set(serving.compute_metrics(results, 2.0, ["ttft"], [99])) >= {"p99_ttft_ms"}
    assert "mean_itl_ms" not in serving.compute_metrics(results, 2.0, ["ttft"], [99])


async def test_one_token_has_no_time_per_output_token(fake: FakeServer) -> None:
    figures = await serving.benchmark(arguments(fake, "--random-output-len", "1", "--num-prompts", "2"))
    assert figures["completed"] == 2
    assert "mean_tpot_ms" not in figures
    assert "mean_itl_ms" not in figures
    assert "-- Time per output token" in serving.report(figures, serving.METRICS, [50])


async def test_what_is_sent(fake: FakeServer) -> None:
    args = arguments(fake, "--ignore-eos", "--top-k", "5", "--temperature", "0.5")
    items = [workloads.WorkItem([1, 2, 3], 2, "abc")]
    calls = serving.build_calls(args, items, "fake")
    results, _ = await serving.run_load(calls, [0.0], None)
    assert results[0].success
    body = fake.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert (body["ignore_eos"], body["top_k"], body["temperature"], body["max_tokens"]) == (True, 5, 0.5, 2)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "top_p" not in body


async def test_chat_sends_text_and_does_not_count_the_role_chunk(fake: FakeServer) -> None:
    args = arguments(fake, "--backend", "openai-chat")
    calls = serving.build_calls(args, [workloads.WorkItem([1], 3, "hello")], "fake")
    (result,), _ = await serving.run_load(calls, [0.0], None)
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert result.text == "xxx"
    assert result.ttft_s >= FIRST_TOKEN_S
    assert len(result.itl_s) == 2
    with pytest.raises(ValueError, match="token ids only"):
        serving.build_calls(args, [workloads.WorkItem([1], 3)], "fake")


async def test_open_loop_does_not_wait_for_answers(fake: FakeServer) -> None:
    calls = serving.build_calls(arguments(fake), [workloads.WorkItem([1], 3)] * 4, "fake")
    results, duration_s = await serving.run_load(calls, [0.0, 0.01, 0.02, 0.2], None)
    starts = [result.start_s - results[0].start_s for result in results]
    assert starts[3] >= 0.19
    assert starts[2] < results[0].ttft_s, "the third must be sent before the first has its first token"
    assert fake.most_in_flight >= 3
    assert duration_s >= 0.2 + FIRST_TOKEN_S + 2 * GAP_S - 0.01


async def test_failures_are_counted_and_named(fake: FakeServer) -> None:
    with pytest.raises(RuntimeError, match=r"HTTP 404.*no such model"):
        await serving.benchmark(arguments(fake, "--num-prompts", "2", "--model", "other"))
    fake.fail_in_stream = True
    with pytest.raises(RuntimeError, match="engine died"):
        await serving.benchmark(arguments(fake, *RANDOM, "--num-prompts", "1"))


async def test_a_refused_connection_is_a_failure() -> None:
    call = client.Call("http://127.0.0.1:9/v1/completions", "openai", "m", [1], 1, {}, {})
    (result,), _ = await serving.run_load([call], [0.0], None)
    assert not result.success
    assert "ClientConnectorError" in result.error


def test_goodput_counts_requests_within_every_limit() -> None:
    def timed(ttft_s: float, latency_s: float) -> object:
        return client.Timed(success=True, ttft_s=ttft_s, latency_s=latency_s, output_tokens=11)

    results = [timed(0.1, 0.6), timed(0.3, 0.8), timed(0.1, 1.6), client.Timed(success=False)]
    assert serving.goodput(results, 2.0, {"ttft": 200.0, "tpot": 60.0}) == pytest.approx(0.5)
    assert serving.goodput(results, 2.0, {"ttft": 200.0}) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "bad",
    [
        ["--percentile-metrics", "ttft,speed"],
        ["--metric-percentiles", "50,101"],
        ["--goodput", "itl:5"],
        ["--max-concurrency", "0"],
    ],
)
def test_bad_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parse_arguments(bad)
    assert bad[0] in capsys.readouterr().err
