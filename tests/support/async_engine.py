"""A started ``AsyncLLM`` on a tiny model, with what a test wants to see of it."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

from conftest_paths import CACHE_FOLDER
from core_thread import CoreThread

from octavo import AsyncLLM
from octavo.engine.args import EngineArgs
from octavo.engine.metrics import FinishedRequest, NullStatSink
from octavo.engine.outputs import RequestOutput

OPTIONS = {
    "compile_cache_dir": str(CACHE_FOLDER / "engine"),
    "block_size": 4,
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 200,
}
"""Few programs, and those that other tests of the engine compile as well."""


class Sink(NullStatSink):
    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []

    def record_finished(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)


class Running:
    """A started engine, its core in a thread of this process, what it told its sink, and a hand on its loop."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.sink = Sink()
        args = EngineArgs(model=str(folder), **{**OPTIONS, **options})
        self.engine = AsyncLLM(args, stat_sink=self.sink, core=CoreThread())

    @property
    def core(self):
        return self.engine._core.core

    def generate(self, prompt, params, request_id: str):
        return aclosing(self.engine.generate(prompt, params, request_id))

    async def outputs(self, prompt, params, request_id: str) -> list[RequestOutput]:
        async with self.generate(prompt, params, request_id) as stream:
            return [output async for output in stream]

    async def final(self, prompt, params, request_id: str) -> RequestOutput:
        return (await self.outputs(prompt, params, request_id))[-1]

    async def until(self, condition, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Within 2 s nothing of any request is left, in the core or before it."""
        await self.until(lambda: not self.core.has_work and not self.engine.stats().num_running, 2.0)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        self.core.scheduler.check_integrity()
        engine = self.engine
        assert (engine._outputs.num_unfinished, engine._collectors, engine._engine_ids) == (0, {}, {})
        assert await engine.wait_drained(0.0)


def make_slow(running, monkeypatch, step_s: float = 0.01) -> None:
    resolve = running.core.runner.resolve

    def late(handle):
        time.sleep(step_s)
        return resolve(handle)

    monkeypatch.setattr(running.core.runner, "resolve", late)


def choices_of(output: RequestOutput) -> list[tuple]:
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def join(outputs: list[RequestOutput]) -> list[tuple]:
    """The choices that deltas add up to."""
    made: dict[int, tuple] = {}
    for choice in (choice for output in outputs for choice in output.outputs):
        index, text, ids, *_ = made.get(choice.index, (choice.index, "", []))
        assert not made.get(choice.index, (None,) * 4)[3], "a choice went on after its end"
        made[index] = (index, text + choice.text, ids + choice.token_ids, choice.finish_reason, choice.stop_reason)
    return [made[index] for index in sorted(made)]
