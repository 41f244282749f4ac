"""The server inside a test's event loop: the real engine, its core in a thread, behind a real socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
from conftest_paths import CACHE_FOLDER
from core_thread import CoreThread
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.core import EngineCore
from octavo.serving import cli, flags
from octavo.serving.server import Server

FLAGS = (
    *("--host", "127.0.0.1", "--port", "0", "--compile-cache-dir", str(CACHE_FOLDER / "engine")),
    *("--block-size", "4", "--max-model-len", "96", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
    *("--num-gpu-blocks-override", "200", "--served-model-name", "tiny"),
)


@dataclass
class RealServer:
    server: Server
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI

    @property
    def engine(self) -> AsyncLLM:
        engine = self.server.state.engine
        assert isinstance(engine, AsyncLLM)
        return engine

    @property
    def core(self) -> EngineCore:
        core = self.engine._core
        assert isinstance(core, CoreThread)
        assert core.core is not None
        return core.core

    async def post(self, path: str, **body: Any) -> Any:
        """The JSON of a POST that is answered with 200."""
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def metrics(self) -> dict[str, float]:
        """Samples by name; the finish reason is added to the name where there is one."""
        async with self.http.get("/metrics") as response:
            text = await response.text()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        reasons = {id(sample): sample.labels.get("finished_reason", "") for sample in samples}
        return {
            f"{sample.name.split(':')[-1]} {reasons[id(sample)]}".strip(): sample.value
            for sample in samples
            if ":" in sample.name and not sample.name.endswith("_bucket")
        }

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Within 2 s no request holds anything."""
        await self.until(lambda: not self.core.has_work and not self.server.state.num_in_flight, 2.0)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        self.core.scheduler.check_integrity()
        assert (self.server.state.num_choices, self.server.state.active_ids) == (0, set())
        assert (self.engine._outputs.num_unfinished, self.engine._collectors) == (0, {})


@asynccontextmanager
async def serve(folder: Path, *options: str) -> AsyncIterator[RealServer]:
    """Started as the command starts it; stopped as a signal stops it, which must succeed."""
    args = cli.make_parser().parse_args(["serve", str(folder), *FLAGS, *options])
    options = flags.server_options(args, [])
    server = Server(
        flags.engine_args(args), options, lambda args, sink: AsyncLLM(args, stat_sink=sink, core=CoreThread())
    )
    task = asyncio.create_task(server.run())
    deadline_s = time.monotonic() + 200
    while not (server.state.engine is not None and server.state.engine.ready):
        assert not task.done(), task.result()
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{server.bound_port}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with aiohttp.ClientSession(url) as http, client:
        yield RealServer(server, http, client)
    server.request_stop()
    assert await asyncio.wait_for(task, 30) == 0
