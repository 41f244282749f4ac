"""Stopping and dying: exit codes of a real process, and what clients see meanwhile."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from octavo.engine.args import EngineArgs
from octavo.engine.messages import StepStats
from octavo.serving.options import ServerOptions
from octavo.serving.progress import ProgressWatch
from octavo.serving.server import Server

SCRIPT = Path(__file__).with_name("fake_server.py")


@asynccontextmanager
async def process(tmp_path: Path, **options):
    """(process, client) of a server of its own."""
    port_file = tmp_path / "port"
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), str(port_file), json.dumps(options), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(30):
            while not port_file.exists():
                assert child.returncode is None, (await child.stderr.read()).decode()
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port_file.read_text()}") as client:
            yield child, client
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def status(client, path: str) -> int:
    async with client.get(path) as response:
        return response.status


async def until_ready(client) -> None:
    while await status(client, "/health") != 200:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)


async def exit_code(child) -> int:
    async with asyncio.timeout(30):
        return await child.wait()


STREAM = {"prompt": "a", "max_tokens": 30, "stream": True}


async def test_running_requests_finish_new_ones_are_refused(tmp_path):
    async with process(tmp_path, fake={"step_s": 0.01}, shutdown_timeout_s=10) as (child, client):
        await until_ready(client)
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            child.send_signal(signal.SIGTERM)
            while await status(client, "/health") == 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.005)
            assert await status(client, "/live") == 200
            async with client.post("/v1/completions", json=STREAM) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
            rest = (await response.content.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert rest.count('"finish_reason":"length"') == 1
        assert await exit_code(child) == 0


async def test_time_up_aborts_what_runs(tmp_path):
    async with process(tmp_path, fake={"step_s": 0.02}, shutdown_timeout_s=0.1) as (child, client):
        await until_ready(client)
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            child.send_signal(signal.SIGTERM)
            rest = (await response.content.read()).decode()
        assert '"finish_reason":"abort"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert await exit_code(child) == 0


async def test_a_second_signal_forces(tmp_path):
    async with process(tmp_path, fake={"step_s": 0.05}, shutdown_timeout_s=60) as (child, client):
        await until_ready(client)
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            child.send_signal(signal.SIGINT)
            await asyncio.sleep(0.05)
            child.send_signal(signal.SIGINT)
            assert '"finish_reason":"abort"' in (await response.content.read()).decode()
        assert await exit_code(child) == 1


async def test_a_stop_before_ready_waits_for_nothing(tmp_path):
    async with process(tmp_path, fake={"start_s": 60}) as (child, client):
        assert await status(client, "/live") == 200
        child.send_signal(signal.SIGTERM)
        assert await exit_code(child) == 0


async def test_what_cannot_start_says_why(tmp_path):
    async with process(tmp_path, cannot_start=True) as (child, _):
        assert await exit_code(child) == 1
        assert "this model is not known" in (await child.stderr.read()).decode()


async def test_death_of_the_engine_ends_the_process(launch):
    """In this process: the running server returns 1, having told the open stream."""
    running = await launch(step_s=0.01, ready=False)
    server = running.server
    await server.close()
    running.server.state.engine = None
    task = asyncio.create_task(server.run())
    while server.state.why_not_ready():  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.bound_port}/v1/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=STREAM) as response:
        await response.content.readuntil(b"\n\n")
        server.state.engine.die()
        rest = (await response.content.read()).decode()
        assert rest.count('"error"') == 1
        assert await asyncio.wait_for(task, 5) == 1
    assert server.state.engine.was_shut_down


async def test_a_port_in_use(launch):
    first = await launch()
    options = ServerOptions(host="127.0.0.1", port=first.server.bound_port)
    assert await Server(EngineArgs(), options, lambda args, sink: None).run() == 1


async def test_no_progress_is_not_healthy_but_may_pass(launch):
    running = await launch(ready=False, hold=True, stuck_timeout_s=0.05)
    await running.server.close()
    task = asyncio.create_task(running.server.run())
    while running.server.state.why_not_ready():  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.005)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{running.server.bound_port}") as client:
        body = {"prompt": "a", "max_tokens": 2}
        waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        while await status(client, "/health") == 200:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert await status(client, "/live") == 200
        running.server.state.engine.release.set()
        for answer in await asyncio.gather(*waiting):
            assert answer.status == 200
        while await status(client, "/health") != 200:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    running.server.request_stop()
    assert await asyncio.wait_for(task, 5) == 0


def test_progress():
    times = iter([0.0, 5.0, 14.0, 16.0, 17.0, 30.0])
    watch = ProgressWatch(10.0, lambda: next(times))
    seen = []
    for stats in (
        StepStats(num_running=1, generation_tokens_total=1),
        StepStats(num_running=1, generation_tokens_total=1),
        StepStats(num_running=1, generation_tokens_total=1),
        StepStats(num_running=1, generation_tokens_total=2),
        StepStats(),
    ):
        watch.update(stats)
        seen.append(watch.stuck)
    assert seen == [False, False, True, False, False]
    idle = ProgressWatch(10.0)
    idle.update(StepStats(), 9.0)
    assert not idle.stuck
    idle.update(StepStats(), 11.0)
    assert idle.stuck
