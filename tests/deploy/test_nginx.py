"""``deploy/nginx.conf`` run by nginx in front of two servers: streams pass as they are made, no new request is lost."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from conftest_paths import CACHE_FOLDER
from fake_core import HANG, TOKEN, WAIT
from nginx_process import NGINX, nginx_process
from prometheus_client.parser import text_string_to_metric_families
from server_process import FAKE, REAL, ServerProcess, events, server_process
from tiny_model import add_tokenizer, tiny_model

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: deploy/nginx.conf is not tested")

Client = aiohttp.ClientSession
HOLDING = "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering; gzip on; gzip_types text/event-stream;"
BUFFERED = {"proxy_buffering off;": HOLDING}
SMALL = (
    *("--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"),
    *("--num-gpu-blocks-override", "64", "--enforce-eager", "--compile-cache-dir", str(CACHE_FOLDER / "engine")),
)
NO_SECOND_TRY = {"http_503 non_idempotent;": "http_503;"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("balanced") / "model"))


@asynccontextmanager
async def servers(command: list[str], folder: Path, *options: str, count: int = 2):
    """Started side by side, all ready."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(server_process(command, folder, *options)) for _ in range(count)]
        await asyncio.gather(*(one.until_ready() for one in started))
        yield started


def kill(server: ServerProcess) -> None:
    """All of it at once, as when a machine goes."""
    server.process.kill()
    for child in server.children:
        child.kill()


def body(first_id: int = TOKEN, **fields) -> dict:
    return {"model": "tiny", "prompt": [first_id], "max_tokens": 5, **fields}


async def post(client: Client, **fields) -> int:
    async with client.post("/v1/completions", json=body(**fields)) as response:
        await response.read()
        return response.status


async def stream_times(client: Client, **fields) -> list[float]:
    """When each event of a stream arrived, which must be complete."""
    times, event = [], b""
    async with client.post("/v1/completions", json=body(stream=True, **fields)) as response:
        assert response.status == 200
        while not event.startswith(b"data: [DONE]"):
            event = await response.content.readuntil(b"\n\n")
            assert event
            times.append(time.monotonic())
    return times


def num_pieces(times: list[float]) -> int:
    return 1 + sum(after - before > 0.003 for before, after in pairwise(times))


async def running(server: ServerProcess, gauge: str = "vllm:num_requests_running") -> float:
    async with Client() as client, client.get(f"{server.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    [value] = [sample.value for family in families for sample in family.samples if sample.name == gauge]
    return value


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 90.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def waiting_at(server: ServerProcess) -> float:
    return await running(server, "vllm:num_requests_waiting")


async def held(pair: Sequence[ServerProcess], client: Client, count: int, before: int = 0) -> list["asyncio.Task[int]"]:
    """Requests of which no byte is answered, half of them at each server, where ``before`` wait already."""
    tasks = [asyncio.create_task(post(client, first_id=WAIT)) for _ in range(count)]

    async def all_there() -> bool:
        return [await waiting_at(one) for one in pair] == [(before + count) / 2] * 2

    await until(all_there)
    return tasks


async def test_what_passes_through(folder, tmp_path):
    """Two servers that live: streams, cancelling, ids, limits; and what a buffering nginx does to a stream."""
    async with servers(FAKE, folder) as pair, nginx_process([one.port for one in pair], tmp_path / "n") as nginx:
        async with Client(nginx.url) as client:
            times = await stream_times(client, max_tokens=100)
            # A hundred steps of 10 ms, and [DONE]: what came was spread over them, and in many pieces.
            assert times[-1] - times[0] > 0.7
            assert num_pieces(times) > 40

            async with client.get("/health") as response:
                assert response.status == 200
            async with client.get("/metrics") as response:
                assert response.status == 404
            async with client.post("/v1/completions", data=b"x" * (33 << 20)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (413, 413)
            headers = {"X-Request-Id": "mine-1"}
            async with client.post("/v1/completions", json=body(), headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine-1"
            async with client.post("/v1/completions", json=body()) as response:
                given = response.headers["X-Request-Id"]
            await until(lambda: asyncio.sleep(0, f"id {given}\n" in nginx.access_log))
            assert "id mine-1\n" in nginx.access_log

            # A client that leaves cancels its request.
            leaving = [asyncio.create_task(stream_times(client, max_tokens=4000)) for _ in range(4)]
            await until(lambda: all_running(pair, 2))
            for task in leaving:
                task.cancel()
            await until(lambda: all_running(pair, 0))
        async with (
            nginx_process([one.port for one in pair], tmp_path / "b", BUFFERED) as nginx,
            Client(nginx.url) as client,
        ):
            times = await stream_times(client, max_tokens=100)
            assert num_pieces(times) < 20, "the check of a stream's times proves nothing"


async def all_running(pair: Sequence[ServerProcess], count: int) -> bool:
    return [await running(one) for one in pair] == [count] * len(pair)


async def each_runs_some(pair: Sequence[ServerProcess], count: int) -> bool:
    """Those that a third server sent away may have been shared unequally."""
    numbers = [await running(one) for one in pair]
    return sum(numbers) == count and min(numbers) > 0


async def test_a_server_is_killed(folder, tmp_path):
    """Whatever has not begun is answered by the other one; streams that ran on the dead one end early."""
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(servers(FAKE, folder))
        ports = [one.port for one in pair]
        nginx = await stack.enter_async_context(nginx_process(ports, tmp_path / "n"))
        mutated = await stack.enter_async_context(nginx_process(ports, tmp_path / "m", NO_SECOND_TRY))
        client = await stack.enter_async_context(Client(nginx.url))
        other_client = await stack.enter_async_context(Client(mutated.url))
        waiting = await held(pair, client, 6)
        doomed = await held(pair, other_client, 6, before=6)
        streams = [asyncio.create_task(stream_times(client, max_tokens=400)) for _ in range(6)]
        await until(lambda: all_running(pair, 3))
        new = []
        for number in range(60):
            if number == 10:
                kill(pair[0])
            new.append(asyncio.create_task(post(client, max_tokens=30)))
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*new) == [200] * 60

        async def moved() -> bool:
            return await waiting_at(pair[1]) == 6 + 3

        await until(moved)
        assert not any(one.done() for one in waiting)
        lost = [one.result() for one in doomed if one.done()]
        assert lost == [503] * 3, "something else than the shipped file saved them"
        ended = await asyncio.gather(*streams, return_exceptions=True)
        assert sum(isinstance(one, list) for one in ended) == 3
        assert sum(isinstance(one, aiohttp.ClientError | asyncio.IncompleteReadError) for one in ended) == 3
        for task in (*waiting, *doomed):
            task.cancel()


async def test_servers_stop_start_and_come_back(folder, tmp_path):
    """One that drains or is not ready gets nothing; with none left the answer is 503; one that is back is found."""
    changes = {"fail_timeout=5s": "fail_timeout=1s"}
    async with servers(FAKE, folder) as pair, server_process(FAKE, folder, "--seed", str(HANG)) as starting:
        ports = [one.port for one in (*pair, starting)]
        async with nginx_process(ports, tmp_path / "n", changes) as nginx, Client(nginx.url) as client:
            streams = [asyncio.create_task(stream_times(client, max_tokens=300)) for _ in range(4)]
            await until(lambda: each_runs_some(pair, 4))
            pair[0].process.terminate()
            statuses = []
            for _ in range(40):
                statuses.append(await post(client))
                async with client.get("/health") as response:
                    statuses.append(response.status)
            assert statuses == [200] * 80
            await asyncio.gather(*streams)
            assert await pair[0].exit_code() == 0
            assert await starting.status("/health") == 503
            kill(pair[1])
            for _ in range(10):
                async with client.post("/v1/completions", json=body()) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, 503)
                    assert int(response.headers["Retry-After"]) > 0
            async with client.get("/health") as response:
                assert response.status == 503
            async with server_process(FAKE, folder, "--port", str(pair[1].port)) as back:
                await back.until_ready()

                async def answered() -> bool:
                    return await post(client) == 200

                await until(answered)
                assert [await post(client) for _ in range(10)] == [200] * 10


async def test_real_servers(folder, tmp_path):
    """The real engine twice, one of them killed: the same text from the other."""
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(servers(REAL, folder, *SMALL))
        nginx = await stack.enter_async_context(nginx_process([one.port for one in pair], tmp_path / "n"))
        client = await stack.enter_async_context(Client(nginx.url))
        request = {
            "model": "tiny",
            "prompt": "the tiny model",
            "max_tokens": 12,
            "temperature": 0.0,
            "ignore_eos": True,
        }

        async def text(**fields) -> str:
            async with client.post("/v1/completions", json={**request, **fields}) as response:
                assert response.status == 200
                if "stream" in fields:
                    return "".join(one["choices"][0]["text"] for one in events(await response.text()))
                return (await response.json())["choices"][0]["text"]

        both = await asyncio.gather(text(), text(), text(stream=True), text(stream=True))
        kill(pair[0])
        after = [await text(), await text(stream=True), await text()]
        assert len({*both, *after}) == 1
        assert both[0]
