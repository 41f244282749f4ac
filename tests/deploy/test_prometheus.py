"""A Prometheus scrapes a server under load: alerts are evaluated, and every query of the dashboard returns data."""

import asyncio
import math
import random
import sys

import aiohttp
import pytest
from conftest_paths import CACHE_FOLDER
from prometheus_process import FOLDER, PROMETHEUS, prometheus_process
from server_process import REAL, server_process
from tiny_model import add_tokenizer, tiny_model

sys.path.insert(0, str(FOLDER.parent / "grafana"))

from panel_data import ask, fill, read_panels

SMALL = (
    *("--block-size", "4", "--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "16"),
    *("--num-gpu-blocks-override", "20", "--swap-space", "0.002", "--max-num-queued-reqs", "8"),
    *("--enforce-eager", "--compile-cache-dir", str(CACHE_FOLDER / "engine")),
)
"""19 blocks of 4 tokens for 4 requests of up to 64: they preempt each other, and leave what they had to host memory."""
PANELS = [
    *("E2E Request Latency", "Token Throughput", "Inter Token Latency", "Scheduler State"),
    *("Time To First Token Latency", "Cache Utilization", "Request Prompt Length", "Request Generation Length"),
    *("Finish Reason", "Queue Time", "Requests Prefill and Decode Time", "Max Generation Token in Sequence Group"),
    *("Prefix Cache Hit Rate by Tier", "Preemptions", "Compiles While Serving", "Step Failures"),
]
"""What people know from vLLM's dashboard, and what they look for here."""


def test_the_dashboard_has_the_panels():
    panels = list(read_panels("1m"))
    titles = [panel.title for panel in panels]
    assert set(PANELS) <= set(titles)
    assert len(titles) == len(set(titles))
    with pytest.raises(ValueError, match="unknown variable"):
        fill("rate(up[$interval])", "1m")


class Load:
    """Requests over few prefixes, again and again, some more of them at once than the queue holds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_tokens = 0
        self.statuses: dict[int, int] = {}
        rng = random.Random(5)
        self.prefixes = [[rng.randrange(3, 300) for _ in range(24)] for _ in range(8)]

    async def ask(self, client: aiohttp.ClientSession, number: int) -> None:
        prompt = [*self.prefixes[number % 8], 3 + number % 200]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12 + number % 8, "ignore_eos": True}
        async with client.post(f"{self.url}/v1/completions", json=body) as response:
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
            answer = await response.json()
            if response.status == 200:
                self.num_tokens += answer["usage"]["completion_tokens"]

    async def run(self, seconds: float) -> None:
        """For this long after its first round, in which a server may still compile, and then all at once."""
        loop = asyncio.get_running_loop()
        number = 7
        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(self.ask(client, i) for i in range(7)))
            end_s = loop.time() + seconds
            while loop.time() < end_s:
                await asyncio.gather(*(self.ask(client, number + i) for i in range(7)))
                number += 7
            await asyncio.gather(*(self.ask(client, i) for i in range(60)))


async def value(prometheus: str, expression: str) -> float:
    """Of a query with one sample; nan when it has none."""
    data = await asyncio.to_thread(ask, prometheus, "query", query=expression)
    samples = [float(one["value"][1]) for one in data["result"]]
    assert len(samples) <= 1
    return samples[0] if samples else math.nan


async def no_data(prometheus: str, expression: str) -> bool:
    data = await asyncio.to_thread(ask, prometheus, "query", query=expression)
    return not data["result"] or any(not math.isfinite(float(one["value"][1])) for one in data["result"])


async def queries_without_data(prometheus: str) -> list[tuple[str, str]]:
    """After a while: a rate has no data until its counter, which may appear with a first answer, was scraped twice."""
    queries = [(panel.title, query.expression) for panel in read_panels("20s") for query in panel.queries]
    assert len(queries) > 40
    for _ in range(6):
        queries = [query for query in queries if await no_data(prometheus, query[1])]
        if not queries:
            break
        await asyncio.sleep(1)
    return queries


async def until_value(prometheus: str, expression: str, wanted: float) -> None:
    for _ in range(60):
        if (found := await value(prometheus, expression)) == wanted:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{expression} is {found}, not {wanted}")


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: scraping and the dashboard are not tested")
async def test_a_server_under_load(tmp_path):
    model = add_tokenizer(tiny_model(tmp_path / "model"))
    async with server_process(REAL, model, *SMALL) as server, prometheus_process(tmp_path, [server.port]) as prometheus:
        await until_value(prometheus, "up", 1)
        await server.until_ready()
        load = Load(server.url)
        await load.run(6.0)
        assert set(load.statuses) == {200, 503}
        await until_value(prometheus, "vllm:generation_tokens_total", load.num_tokens)
        await until_value(prometheus, "vllm:admission_rejections_total", load.statuses[503])
        await until_value(prometheus, "vllm:e2e_request_latency_seconds_count", load.statuses[200])
        for counter in ("vllm:external_prefix_cache_hits_total", "vllm:num_preemptions_total"):
            assert await value(prometheus, counter) > 0, counter

        assert not await queries_without_data(prometheus)
        assert await no_data(prometheus, "vllm:no_such_metric")
        assert await no_data(prometheus, "sum(vllm:num_preemptions_total) * 0 / 0")

        groups = (await asyncio.to_thread(ask, prometheus, "rules"))["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        assert (await value(prometheus, 'ALERTS{alertname="OctavoDown"}')) is math.nan
        server.process.kill()
        await until_value(prometheus, 'ALERTS{alertname="OctavoDown", alertstate="pending"}', 1)
