"""The server's processes: one dies, all end; a stop lets requests finish; several API processes count as one."""

import asyncio
import os
import signal
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fake_core import FAIL, HANG, TOKEN, WAIT
from prometheus_client.parser import text_string_to_metric_families
from real_server import FLAGS
from server_process import FAKE, REAL, events, server_process
from tiny_model import add_tokenizer, tiny_model

STREAM = {"model": "tiny", "max_tokens": 1000, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("processes") / "model"))


@asynccontextmanager
async def fake(folder: Path, *options: str):
    async with server_process(FAKE, folder, *options) as server:
        await server.until_ready()
        yield server


class Client:
    """Every request over a connection of its own, so that all API processes get some."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def stream(self, started: asyncio.Event | None = None, first_id: int = TOKEN, **fields) -> str:
        async with aiohttp.ClientSession() as session:
            body = {**STREAM, "prompt": [first_id], **fields}
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                text = (await response.content.readuntil(b"\n\n")).decode()
                if started is not None:
                    started.set()
                return text + (await response.content.read()).decode()

    async def post(self, first_id: int = TOKEN, **fields) -> int:
        async with aiohttp.ClientSession() as session:
            body = {"model": "tiny", "max_tokens": 5, "prompt": [first_id], **fields}
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                await response.read()
                return response.status

    async def streams(self, count: int) -> list["asyncio.Task[str]"]:
        """Streams that have begun."""
        started = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(self.stream(event)) for event in started]
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in started))
        return tasks

    async def waiting(self, count: int) -> list["asyncio.Task[int]"]:
        """Requests that the core holds back, with nothing of them sent yet."""
        tasks = [asyncio.create_task(self.post(WAIT)) for _ in range(count)]
        async with asyncio.timeout(20):
            while (await self.metrics())["vllm:num_requests_waiting"] != count:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        return tasks

    async def metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            return totals(await response.text())


def totals(text: str) -> dict[str, float]:
    """All samples of a scrape but buckets, summed over labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


WAYS = {
    "killed": ((), lambda server: server.core.kill(), "killed by SIGKILL"),
    "suspended": (("--engine-step-timeout", "1"), lambda server: server.core.suspend(), "no step within 1 s"),
    "fails": (("--api-server-count", "2"), FAIL, "the device is gone"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_core_dies(folder, way):
    options, cause, said = WAYS[way]
    async with fake(folder, *options) as server:
        client = Client(server.url)
        waiting = await client.waiting(3)
        streams = await client.streams(6)
        began_s = time.monotonic()
        if callable(cause):
            cause(server)
        else:
            waiting.append(asyncio.create_task(client.post(cause)))
        async with asyncio.timeout(10):
            while await server.status("/health") == 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*waiting) == [503] * len(waiting)
            bodies = await asyncio.gather(*streams)
        assert time.monotonic() - began_s < 10
        for body in bodies:
            assert [("error" in event) for event in events(body)].count(True) == 1
            assert "error" in events(body)[-1]
            assert "[DONE]" not in body
        assert await server.exit_code() == 1
        assert said in server.log
        await server.nothing_is_left()


async def test_an_api_process_dies(folder):
    async with fake(folder, "--api-server-count", "2") as server:
        client = Client(server.url)
        streams = await client.streams(8)
        server.apis[0].kill()
        results = await asyncio.gather(*streams, return_exceptions=True)
        bodies = [result for result in results if isinstance(result, str)]
        assert any(isinstance(result, aiohttp.ClientError) for result in results), "none was at the dead process"
        assert bodies, "none was at the other process"
        assert all("error" in events(body)[-1] for body in bodies)
        assert await server.exit_code() == 1
        assert "API process 0 was killed by SIGKILL" in server.log
        await server.nothing_is_left()


async def test_the_supervisor_is_killed(folder):
    async with fake(folder, "--api-server-count", "2") as server:
        streams = await Client(server.url).streams(4)
        server.process.kill()
        await server.nothing_is_left()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, aiohttp.ClientError) for result in results)


async def test_a_stop_lets_requests_finish(folder):
    async with fake(folder, "--api-server-count", "2", "--shutdown-timeout", "20") as server:
        client = Client(server.url)
        started = asyncio.Event()
        stream = asyncio.create_task(client.stream(started, max_tokens=400))
        await started.wait()
        for child in server.children:  # a signal to all of a group or container
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        statuses = set()
        while not stream.done():
            try:
                statuses |= {await server.status("/health"), await client.post(), await server.status("/live")}
            except aiohttp.ClientConnectionError:  # only once nothing runs any more, in any process
                await asyncio.wait_for(asyncio.shield(stream), 1)
        assert statuses <= {200, 503}
        assert 503 in statuses
        body = await stream
        assert body.endswith("data: [DONE]\n\n")
        assert events(body)[-1]["choices"][0]["finish_reason"] == "length"
        assert await server.exit_code() == 0
        await server.nothing_is_left()


async def test_time_is_up(folder):
    async with fake(folder, "--shutdown-timeout", "0.2") as server:
        [stream] = await Client(server.url).streams(1)
        server.process.send_signal(signal.SIGTERM)
        assert events(await stream)[-1]["choices"][0]["finish_reason"] == "abort"
        assert await server.exit_code() == 0
        await server.nothing_is_left()


async def test_a_second_signal_forces(folder):
    async with fake(folder, "--shutdown-timeout", "60") as server:
        [stream] = await Client(server.url).streams(1)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        server.process.send_signal(signal.SIGINT)
        assert events(await stream)[-1]["choices"][0]["finish_reason"] == "abort"
        assert await server.exit_code() == 1
        await server.nothing_is_left()


async def test_a_stop_while_starting(folder):
    async with server_process(FAKE, folder, "--seed", str(HANG)) as server:
        while await server.status("/live") != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        assert await server.status("/health") == 503
        server.see_children()
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert time.monotonic() - began_s < 5.0
        await server.nothing_is_left()


async def test_a_model_that_cannot_be_served(folder):
    async with server_process(FAKE, folder, "--seed", str(FAIL), "--api-server-count", "2") as server:
        assert await server.exit_code() == 1
        assert server.log.count("cannot start: this model is not known") == 1
        assert "Traceback" not in server.log
        await server.nothing_is_left()


class Scraper:
    """One connection that stays open, and so one API process."""

    @classmethod
    async def open(cls, server) -> "Scraper":
        scraper = cls()
        scraper.reader, scraper.writer = await asyncio.open_connection("127.0.0.1", server.port)
        port = scraper.writer.get_extra_info("sockname")[1]
        await scraper.metrics()
        owners = [one.pid for one in server.apis for other in one.net_connections("tcp") if _port_of(other) == port]
        [scraper.pid] = owners
        return scraper

    async def metrics(self) -> dict[str, float]:
        self.writer.write(b"GET /metrics HTTP/1.1\r\nHost: octavo\r\n\r\n")
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        [length] = [line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:")]
        return totals((await self.reader.readexactly(int(length))).decode())


def _port_of(connection) -> int | None:
    return connection.raddr.port if connection.raddr else None


async def test_metrics_of_three_processes_are_one(folder):
    async with fake(folder, "--api-server-count", "3") as server:
        scrapers: dict[int, Scraper] = {}
        while len(scrapers) < 3:
            scraper = await Scraper.open(server)
            scrapers[scraper.pid] = scraper
        client = Client(server.url)
        jobs = [asyncio.create_task(client.post(max_tokens=5 + i)) for i in range(60)]
        before: dict[str, float] = {}
        while not all(job.done() for job in jobs):
            for scraper in scrapers.values():
                after = await scraper.metrics()
                counters = [name for name in after if name.endswith(("_total", "_count", "_sum"))]
                assert not [name for name in counters if after[name] < before.get(name, 0.0)]
                assert set(counters) >= {name for name in before if name.endswith(("_total", "_count", "_sum"))}
                before = after
        assert [job.result() for job in jobs] == [200] * 60
        for scraper in scrapers.values():
            after = await scraper.metrics()
            assert after["vllm:request_success_total"] == 60
            assert after["vllm:generation_tokens_total"] == sum(range(5, 65))
            assert after["vllm:request_generation_tokens_sum"] == sum(range(5, 65))
            assert after["vllm:time_to_first_token_seconds_count"] == 60
            assert after["vllm:num_requests_running"] == 0
            # A step is counted once, though several processes hear of it.
            assert 64 <= after["vllm:iteration_tokens_total_count"] < 64 + 60
            memory = sum(one.memory_info().rss for one in server.children)
            assert after["process_resident_memory_bytes"] > 0.8 * memory
            scraper.writer.close()


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_port_in_use(folder, count, tmp_path):
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            process = await asyncio.create_subprocess_exec(
                *FAKE,
                *("serve", str(folder), "--host", "127.0.0.1", "--port", port, "--api-server-count", count),
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(tmp_path)},
            )
            _, text = await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 1
            assert "cannot listen" in text.decode()
            assert list(tmp_path.iterdir()) == []

    asyncio.run(run())


async def test_a_unix_socket(folder, tmp_path):
    path = f"/tmp/octavo-test-{os.getpid()}.sock"
    async with server_process(FAKE, folder, "--uds", path) as server:
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession(connector=connector) as client, asyncio.timeout(30):
            while True:
                try:
                    async with client.get("http://octavo/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    assert server.process.returncode is None, server.log
                await asyncio.sleep(0.05)
        server.see_children()
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert not os.path.exists(path)  # noqa: ASYNC240
        await server.nothing_is_left()


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} must not be imported in {sys.orig_argv[1:4]}")

if "octavo.engine.core_process" in sys.orig_argv:
    blocked = {"transformers", "tokenizers", "aiohttp"}
elif "octavo" in sys.orig_argv:
    blocked = {"jax", "jaxlib", "flax", "transformers", "tokenizers", "aiohttp"}
else:
    blocked = {"jax", "jaxlib", "flax"}
sys.meta_path.insert(0, Blocker())
"""


async def test_the_real_core_and_what_each_process_imports(folder, tmp_path):
    """The device's library in the core only, the tokenizers in the API processes only: others cannot import them."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    options = [*FLAGS, "--api-server-count", "2"]
    async with server_process(REAL, folder, *options, python_path=str(tmp_path)) as server:
        await server.until_ready()
        client = Client(server.url)
        body = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, "prompt": "the tiny model"}
        texts = set()
        for _ in range(6):
            chunks = events(await client.stream(None, **body))
            texts.add("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
        assert len(texts) == 1
        assert texts != {""}
        assert "must not be imported" not in server.log
        assert (await client.metrics())["vllm:request_success_total"] == 6
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        await server.nothing_is_left()
