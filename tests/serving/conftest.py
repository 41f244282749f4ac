"""A server as it is really started, over a fake engine, and clients for it."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest

from octavo.engine.args import EngineArgs
from octavo.serving.options import ServerOptions
from octavo.serving.server import Server

sys.path.insert(0, str(Path(__file__).parent))

from serving_fakes import FakeEngine, FakeOptions


@dataclass
class Running:
    server: Server
    engine: FakeEngine
    url: str
    http: aiohttp.ClientSession
    """Its base is ``url``."""

    def openai(self, **options: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    async def post(self, path: str, body: object, **options: object) -> tuple[int, object]:
        """(status, JSON) of a POST."""
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()


Launch = Callable[..., Awaitable[Running]]


@pytest.fixture
async def launch():
    """Starts servers: ``await launch(step_s=0.01, api_keys=["k"])`` takes options of the fake and of the server."""
    started: list[Running] = []

    async def start(*, ready: bool = True, **options: object) -> Running:
        names = FakeOptions.__dataclass_fields__
        fake = FakeOptions(**{name: value for name, value in options.items() if name in names})
        rest = {name: value for name, value in options.items() if name not in names}
        server_options = ServerOptions(host="127.0.0.1", port=0, **rest)
        server = Server(EngineArgs(), server_options, lambda args, sink: FakeEngine(args, sink, fake))
        await server.open_port()
        url = f"http://127.0.0.1:{server.bound_port}"
        if ready:
            await server.start_engine()
        running = Running(server, server.state.engine, url, aiohttp.ClientSession(url))
        started.append(running)
        return running

    yield start
    for running in started:
        await running.http.close()
        await running.server.close()


@pytest.fixture
async def running(launch: Launch) -> Running:
    return await launch()
