"""The loop of a core behind its socket: messages in, one message a step out to each process that it concerns.

``run_core`` is the whole life of such a process. It knows nothing of the device: what it runs is handed to it.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import zmq

from ..models.loading.resolve import ResolvedModel
from .config import PROGRAM_WRITER, WRITER_WAIT_S, EngineConfig
from .errors import ConfigError
from .find_model import find_model
from .messages import AbortRequest, ChoiceOutput, EngineRequest, StepOutputs, StepStats
from .stats_board import CoreFigures, StatsBoard
from .wire import (
    Call,
    CoreStart,
    Died,
    Failed,
    FromCore,
    Hello,
    Log,
    Ready,
    Result,
    ToCore,
    bind_core,
    client_of,
    decode,
    decode_start,
    encode,
    is_readable,
)

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 200
"""How long an idle core sleeps at most: lines of its log wait for it, and its owner wants to see that it lives."""
MAX_WAITING_LINES = 1000
"""Lines of the log that are kept for the first API process; the oldest go first."""
CLOSE_LINGER_MS = 1000
"""How long the last words may take to leave."""


class Core(Protocol):
    """What the loop runs: ``engine.core.EngineCore``, or a stand-in."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, message: EngineRequest | AbortRequest) -> None: ...

    def step(self) -> StepOutputs: ...

    def stats(self) -> StepStats: ...

    def reset_prefix_cache(self) -> bool: ...


Launch = Callable[[EngineConfig, ResolvedModel, int | None], tuple[Core, EngineConfig]]
"""Makes a core of the options, the model and the size of its tokenizer. Raises ConfigError."""


class CoreServer:
    """The core's end of the socket in ``folder``. For the thread that made it; only ``log`` may be called from any."""

    def __init__(self, folder: str | Path) -> None:
        self._thread = threading.get_ident()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_core(self._context, folder)
        self._board = StatsBoard(folder)
        self._clients: list[bytes] = []
        self._hello: Hello | None = None
        self._ready: Ready | None = None
        self._lines: deque[Log] = deque(maxlen=MAX_WAITING_LINES)
        self._was_busy = False

    def wait_for_hello(self) -> Hello:
        """What the first API process says of the model."""
        while self._hello is None:
            if self._socket.poll(IDLE_POLL_MS):
                self._receive(None)
        return self._hello

    def serve(self, core: Core, config: EngineConfig) -> None:
        """Runs ``core`` for ever. Raises what the core raises."""
        self._ready = Ready(config=config)
        self._write_board(core, core.stats())
        for client in self._clients:
            self._send(client, self._ready)
        while True:
            self._take_messages(core)
            if core.has_work:
                if not self._was_busy:
                    self._write_board(core, core.stats())
                outputs = core.step()
                # First the board: whoever has an output in hand finds it counted.
                self._write_board(core, outputs.stats)
                self._send_outputs(outputs)
            else:
                self._write_board(core, core.stats())
            self._flush_log()

    def fail(self, error: BaseException, *, is_config_error: bool = False) -> bool:
        """Tells the processes around that this is the end; False if there is none to tell."""
        self._flush_log()
        text = str(error) if is_config_error else f"{type(error).__name__}: {error}"
        if self._ready is None:
            # The others would only repeat it; they learn of the end from whoever started them.
            for client in self._clients[:1]:
                self._send(client, Failed(message=text, is_config_error=is_config_error))
        else:
            for client in self._clients:
                self._send(client, Died(message=text))
        return bool(self._clients)

    def close(self) -> None:
        self._socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()
        self._board.close()

    def log(self, line: Log) -> None:
        """Hands a line to the first API process, as soon as there is one."""
        self._lines.append(line)
        if threading.get_ident() == self._thread:
            self._flush_log()

    def _flush_log(self) -> None:
        while self._clients and self._lines:
            self._send(self._clients[0], self._lines.popleft())

    def _send(self, client: bytes, message: FromCore) -> None:
        self._socket.send_multipart((client, *encode(message)))

    def _take_messages(self, core: Core) -> None:
        """Takes in what has arrived; without work it waits for that, but not for long."""
        if not core.has_work and not self._socket.poll(IDLE_POLL_MS):
            return
        while is_readable(self._socket):
            self._receive(core)

    def _receive(self, core: Core | None) -> None:
        client, *frames = self._socket.recv_multipart()
        message: ToCore | FromCore = decode(frames)
        if isinstance(message, Hello):
            self._greet(client, message)
        elif core is None:
            raise ValueError(f"{type(message).__name__} came before the core was ready")
        elif isinstance(message, EngineRequest | AbortRequest):
            core.handle(message)
        elif isinstance(message, Call):
            self._send(client, _answer(core, message))
        else:
            raise ValueError(f"{type(message).__name__} is not for the core")

    def _greet(self, client: bytes, hello: Hello) -> None:
        self._clients.append(client)
        self._clients.sort(key=int)
        self._hello = self._hello or hello
        if self._ready is not None:
            self._send(client, self._ready)

    def _send_outputs(self, outputs: StepOutputs) -> None:
        if len(self._clients) == 1:
            self._send(self._clients[0], outputs)
            return
        parts: dict[bytes, list[ChoiceOutput]] = {self._clients[0]: []} if self._clients else {}
        for output in outputs.outputs:
            parts.setdefault(client_of(output.request_id), []).append(output)
        for client, part in parts.items():
            self._send(client, StepOutputs(outputs=part, stats=outputs.stats))

    def _write_board(self, core: Core, stats: StepStats) -> None:
        self._was_busy = core.has_work
        self._board.write(CoreFigures(stats=stats, progress_time_s=time.monotonic()))


class LogForwarder(logging.Handler):
    """Sends the lines of this process's log to the first API process, which logs them as its own."""

    def __init__(self, server: CoreServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._server.log(Log(name=record.name, level=record.levelno, message=self.format(record)))
        except Exception:
            self.handleError(record)


def _answer(core: Core, call: Call) -> Result:
    if call.method != "reset_prefix_cache":
        return Result(call_id=call.call_id, error=f"the core has no function {call.method!r}")
    return Result(call_id=call.call_id, value=core.reset_prefix_cache())


def run_core(launch: Launch, stdin: int) -> NoReturn:
    """The life of a core's process.

    It reads one line (``wire.CoreStart``) from the file descriptor ``stdin`` and lives no longer than whoever holds the
    other end of it. The exit status is 1 when the core has failed.
    """
    # Who started this process says when it stops: a signal to the whole group must not cut running requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(stdin, 65536)
        if not data:
            os._exit(1)
        line += data
    start = decode_start(line)
    threading.Thread(target=_end_with_owner, args=(stdin, start.folder), name="octavo-owner", daemon=True).start()
    server = CoreServer(start.folder)
    _set_up_logging(server, start.log_level)
    try:
        _launch_and_serve(server, start, launch)
    except BaseException as error:
        is_config_error = isinstance(error, ConfigError)
        if not is_config_error:
            logger.exception("the core failed")
        if not server.fail(error, is_config_error=is_config_error):
            traceback.print_exc()
    server.close()
    sys.stderr.flush()
    os._exit(1)  # threads that compile may go on for minutes


def _launch_and_serve(server: CoreServer, start: CoreStart, launch: Launch) -> None:
    hello = server.wait_for_hello()
    core, config = launch(start.config, find_model(start.config.model, hello.model_path), hello.vocab_size)
    # What is there now stays: a full collection among steps would walk over each block of the pool, for 100 ms.
    gc.collect()
    gc.freeze()
    server.serve(core, config)


def _end_with_owner(stdin: int, folder: str) -> None:
    """Ends this process, in whatever it is, once the owner has closed its end of the pipe or died."""
    while os.read(stdin, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    for thread in threading.enumerate():
        if thread.name == PROGRAM_WRITER:
            thread.join(WRITER_WAIT_S)  # or the next start compiles once more
    os._exit(0)


def _set_up_logging(server: CoreServer, level: int) -> None:
    root = logging.getLogger()
    root.handlers[:] = [LogForwarder(server)]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(__name__.split(".")[0]).setLevel(level)
