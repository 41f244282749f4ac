"""Figures of requests that had it hard: prompts in many chunks, preempted. The real scheduler, without a device."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scheduled_core import SCHEDULED
from server_process import server_process
from tiny_model import add_tokenizer, tiny_model

OPTIONS = (
    *("--block-size", "4", "--max-model-len", "128", "--num-gpu-blocks-override", "54"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "8"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("pressure") / "model"))


async def families(http: aiohttp.ClientSession) -> dict:
    async with http.get("/metrics") as response:
        return {family.name: family for family in text_string_to_metric_families(await response.text())}


def value(family, name: str) -> float:
    return sum(sample.value for sample in family.samples if sample.name == name)


async def test_one_time_to_first_token_for_each_request(folder):
    """Ten prompts of 100 tokens in chunks of 8, in a pool for two and a bit: counts are of requests, not of steps."""
    async with server_process(SCHEDULED, folder, *OPTIONS) as server:
        await server.until_ready()
        async with aiohttp.ClientSession(server.url) as http:

            async def one(index: int) -> None:
                prompt = [3 + (index * 13 + place) % 290 for place in range(100)]
                body = {"prompt": prompt, "max_tokens": 27, "ignore_eos": True, "stream": index % 2 == 0}
                async with http.post("/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()

            await asyncio.gather(*map(one, range(10)))
            found = await families(http)
        assert value(found["vllm:num_preemptions"], "vllm:num_preemptions_total") > 0
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
            family = found[f"vllm:{name}_seconds"]
            count = value(family, f"{family.name}_count")
            assert count == 10, name
            assert value(family, f"{family.name}_sum") > 0, name
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert buckets == sorted(buckets), "cumulative"
            assert buckets[-1] == count, "+Inf"
        preemptions = found["vllm:request_num_preemptions"]
        assert value(preemptions, "vllm:request_num_preemptions_count") == 10
        assert value(found["vllm:inter_token_latency_seconds"], "vllm:inter_token_latency_seconds_count") == 260
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value(found[f"vllm:{name}"], f"vllm:{name}") == 0, name
