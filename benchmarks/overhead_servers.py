"""The two servers that ``api_overhead.py`` measures: Octavo's API over a core that emits at will, and bare aiohttp.

    python benchmarks/overhead_servers.py api --tally FILE --streams 256
    python benchmarks/overhead_servers.py core --tally FILE --streams 256 --folder FOLDER    (started by api)
    python benchmarks/overhead_servers.py ceiling --tally FILE --streams 256 --frame FILE --tokens 512

Each prints its port once it serves, and runs until it is killed.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from aiohttp import web
from stream_counter import Tally

from octavo.engine.args import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.config import EngineConfig
from octavo.engine.core_client import CoreConnection
from octavo.engine.core_server import CoreServer
from octavo.engine.frontend import open_model
from octavo.engine.messages import AbortRequest, ChoiceOutput, EngineRequest, FinishReason, StepOutputs, StepStats
from octavo.engine.metrics import StatSink
from octavo.engine.stats_board import create_board
from octavo.serving.options import ServerOptions
from octavo.serving.server import Server

MARKER = "~"
MODEL_NAME = "fake"
CONTEXT_LEN = 1 << 20
PAUSE_S = 0.0001
PATIENCE_S = 1.0


class FakeCore:
    """Gives every request the same token in every step. A step follows as soon as the client has counted the last one.

    So no outputs pile up in the API process, where they would be merged. Nothing is emitted until ``streams`` requests
    are there.
    """

    def __init__(self, token_id: int, tally: Tally, streams: int) -> None:
        self._token_id = token_id
        self._tally = tally
        self._streams = streams
        self._left: dict[str, int] = {}
        self._emitted = 0
        self._started = False

    @property
    def has_work(self) -> bool:
        self._started = bool(self._left) and (self._started or len(self._left) >= self._streams)
        return self._started

    def handle(self, message: EngineRequest | AbortRequest) -> None:
        if isinstance(message, AbortRequest):
            self._left.pop(message.request_id, None)
            return
        assert message.sampling_params.max_tokens is not None
        if not self._left:
            self._tally.tokens = self._emitted = 0
        self._left[message.request_id] = message.sampling_params.max_tokens

    def step(self) -> StepOutputs:
        deadline_s = time.monotonic() + PATIENCE_S
        while self._emitted > self._tally.tokens and time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)
        outputs = []
        for request_id, left in list(self._left.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(
                ChoiceOutput(request_id=request_id, index=0, token_ids=[self._token_id], finish_reason=reason)
            )
            self._left[request_id] = left - 1
            if reason is not None:
                del self._left[request_id]
        self._emitted += len(outputs)
        return StepOutputs(outputs=outputs, stats=self.stats(len(outputs)))

    def stats(self, num_scheduled_tokens: int = 0) -> StepStats:
        return StepStats(num_running=len(self._left), num_scheduled_tokens=num_scheduled_tokens)

    def reset_prefix_cache(self) -> bool:
        return True


def serve_core(args: argparse.Namespace) -> None:
    """The fake core behind the real socket; ends with the process that started it."""
    config = EngineConfig.from_args(EngineArgs(model=args.model, served_model_name=(MODEL_NAME,)))
    tokenizer = open_model(config).tokenizer
    assert tokenizer is not None
    config = config.resolve(
        platform="cpu",
        context_len=CONTEXT_LEN,
        model_path=MODEL_NAME,
        model_name=MODEL_NAME,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(),
    )
    [token_id] = tokenizer.encode(MARKER, add_special_tokens=False)
    threading.Thread(target=end_with_owner, args=(args.folder,), daemon=True).start()
    server = CoreServer(args.folder)
    server.wait_for_hello()
    core = FakeCore(token_id, Tally(args.tally), args.streams)
    server.serve(core, config.with_pool(CONTEXT_LEN // config.block_size + 1))


def end_with_owner(folder: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


async def serve_api(args: argparse.Namespace) -> None:
    """The server as ``octavo serve`` starts it, logging per request off."""
    options = ServerOptions(host="127.0.0.1", port=0, disable_access_log=True)
    folder = tempfile.mkdtemp(prefix="octavo-overhead-")
    create_board(folder)
    arguments = ["--folder", folder, "--tally", str(args.tally), "--streams", str(args.streams)]
    arguments += ["--model", args.model] if args.model else []
    core = subprocess.Popen([sys.executable, __file__, "core", *arguments], stdin=subprocess.PIPE)  # noqa: ASYNC220

    def make_engine(engine_args: EngineArgs, sink: StatSink) -> AsyncLLM:
        return AsyncLLM(engine_args, stat_sink=sink, core=CoreConnection(folder))

    server = Server(EngineArgs(model=args.model, served_model_name=(MODEL_NAME,)), options, make_engine)
    serving = asyncio.create_task(server.run())
    while server.state.why_not_ready() and not serving.done():  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0.05)
    print(server.bound_port, flush=True)
    await serving
    core.kill()


class Ceiling:
    """The least that aiohttp can do: one handler a stream, one write a frame, in the same steps as the fake core's."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._frame = args.frame.read_bytes()
        self._tally = Tally(args.tally)
        self._num_open = 0
        self._tick: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._num_open += 1
        for _ in range(self._args.tokens):
            await self._tick
            await response.write(self._frame)
        self._num_open -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def tick_forever(self) -> None:
        """One step after another, once all streams are open."""
        while True:
            while self._num_open < self._args.streams:  # noqa: ASYNC110 - counted by other tasks
                await asyncio.sleep(PAUSE_S)
            self._tally.tokens = emitted = 0
            while self._num_open:
                if emitted <= self._tally.tokens:
                    emitted += self._num_open
                    self._tick.set_result(None)
                    self._tick = asyncio.get_running_loop().create_future()
                await asyncio.sleep(PAUSE_S)


async def serve_ceiling(args: argparse.Namespace) -> None:
    ceiling = Ceiling(args)

    app = web.Application()
    app.router.add_post("/{path:.*}", ceiling.stream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await ceiling.tick_forever()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="which", required=True)
    api, core, ceiling = (which.add_parser(name) for name in ("api", "core", "ceiling"))
    for one in (api, core, ceiling):
        one.add_argument("--streams", type=int, required=True)
        one.add_argument("--tally", type=Path, required=True)
    for one in (api, core):
        one.add_argument("--model")
    core.add_argument("--folder", required=True)
    ceiling.add_argument("--frame", type=Path, required=True)
    ceiling.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args(argv)
    if args.which == "core":
        serve_core(args)
    else:
        asyncio.run(serve_api(args) if args.which == "api" else serve_ceiling(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
