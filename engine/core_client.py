"""The API side of the core: what an ``AsyncLLM`` asks of it, and the two ways to come by one.

``CoreConnection`` joins a core that somebody else has started (the server's supervisor); ``OwnCore`` starts one.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import zmq

from .config import EngineConfig
from .core_child import CoreChild
from .errors import ConfigError, EngineDeadError, RequestError
from .frontend import Frontend
from .messages import AbortRequest, EngineRequest, StepOutputs, StepStats
from .stats_board import StatsBoard
from .wire import (
    Call,
    Died,
    Failed,
    FromCore,
    Hello,
    Log,
    Ready,
    Result,
    ToCore,
    connect_client,
    decode,
    encode,
    is_readable,
)

logger = logging.getLogger(__name__)

WATCH_S = 0.1
"""How often an owner looks whether its core lives."""
LAST_WORDS_S = 0.2
"""How long a core that has died may still be heard: it may have said why."""


OnOutputs = Callable[[StepOutputs], None]
OnDeath = Callable[[BaseException], None]


class CoreClient(Protocol):
    """A core as seen from an event loop, on whose thread all but ``stop`` is called."""

    @property
    def identity(self) -> str:
        """What comes before the ``-`` in the ids of this process's requests."""
        ...

    @property
    def dead_error(self) -> BaseException | None: ...

    def begin(self, config: EngineConfig) -> None:
        """Starts what needs no model yet. Raises ConfigError."""

    async def start(
        self, config: EngineConfig, frontend: Frontend, on_outputs: OnOutputs, on_death: OnDeath
    ) -> EngineConfig:
        """Waits until the core can serve; the configuration with all derived values. Raises ConfigError.

        ``on_outputs`` and ``on_death`` are called on the event loop's thread.
        """
        ...

    def send(self, message: EngineRequest | AbortRequest) -> None:
        """Hands a message to the core. Raises EngineDeadError once it has ended, RequestError for what cannot go."""

    async def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> StepStats:
        """Figures of this moment; those of the end once the core has ended."""
        ...

    def stalled_s(self) -> float:
        """Seconds since the core has done anything: finished a step or, without work, looked for some."""
        ...

    def stop(self) -> None:
        """Leaves the core, which ends if it is this process's own. May be called from any thread, and again."""


class CoreConnection:
    """A connection to the core whose socket is in ``folder``. ``identity`` is this process's number."""

    def __init__(self, folder: str | Path, identity: str = "0") -> None:
        self.identity = identity
        self.dead_error: BaseException | None = None
        self._folder = folder
        self._board = StatsBoard(folder)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._on_outputs: OnOutputs | None = None
        self._on_death: OnDeath | None = None
        self._ready: asyncio.Future[EngineConfig] | None = None
        self._calls: dict[int, asyncio.Future[Result]] = {}
        self._call_ids = itertools.count()

    def begin(self, config: EngineConfig) -> None:
        pass

    async def start(
        self, config: EngineConfig, frontend: Frontend, on_outputs: OnOutputs, on_death: OnDeath
    ) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        self._ready = self._loop.create_future()
        if self.dead_error is not None:
            raise self.dead_error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_client(self._context, self._folder, self.identity.encode())
        self._loop.add_reader(self._socket.fileno(), self._read_one)
        self._send(Hello(model_path=str(frontend.resolved.path), vocab_size=frontend.vocab_size))
        return await self._ready

    def send(self, message: EngineRequest | AbortRequest) -> None:
        self._send(message)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    def stats(self) -> StepStats:
        return self._board.read().stats

    def stalled_s(self) -> float:
        return self._board.read().stalled_s()

    def stop(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._close)

    def fail(self, message: str) -> None:
        """Takes in that the core has died, or is about to: after its last words everybody is told."""
        if self._loop is None:
            self.dead_error = self.dead_error or EngineDeadError(message)
        else:
            self._loop.call_later(LAST_WORDS_S, self._die, EngineDeadError(message))

    # ---- inside -----------------------------------------------------------------------------

    def _send(self, message: ToCore) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_error}") from self.dead_error
        if self._socket is None or self._loop is None:
            raise EngineDeadError("the engine has not been started")
        try:
            frames = encode(message)
        except (OverflowError, TypeError, UnicodeError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        self._socket.send_multipart(frames)
        # The socket's file descriptor tells only of changes, and sending may have used one up.
        if is_readable(self._socket):
            self._loop.call_soon(self._read_one)

    async def _call(self, method: str) -> object:
        assert self._loop is not None, "not started"
        call_id = next(self._call_ids)
        self._calls[call_id] = future = self._loop.create_future()
        try:
            self._send(Call(call_id=call_id, method=method))
            result = await future
        finally:
            del self._calls[call_id]
        if result.error is not None:
            raise RuntimeError(result.error)
        return result.value

    def _read_one(self) -> None:
        """Takes in one message, so that between two of them other tasks have their turn."""
        if self._socket is None or not is_readable(self._socket):
            return
        message = decode(self._socket.recv_multipart())
        assert self._loop is not None
        if is_readable(self._socket):
            self._loop.call_soon(self._read_one)
        self._take(message)

    def _take(self, message: ToCore | FromCore) -> None:
        assert self._on_outputs is not None
        assert self._ready is not None
        if isinstance(message, StepOutputs):
            if self.dead_error is None:
                self._on_outputs(message)
        elif isinstance(message, Log):
            logging.getLogger(message.name).log(message.level, "%s", message.message)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.config)
        elif isinstance(message, Result):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():  # its caller may have gone in this very turn of the loop
                future.set_result(message)
        elif isinstance(message, Failed):
            self._die(ConfigError(message.message) if message.is_config_error else EngineDeadError(message.message))
        elif isinstance(message, Died):
            self._die(EngineDeadError(message.message))
        else:
            raise ValueError(f"{type(message).__name__} is for the core")

    def _die(self, error: Exception) -> None:
        if self.dead_error is not None:
            return
        self.dead_error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_death is not None:
            self._on_death(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine has stopped: {error}"))

    def _close(self) -> None:
        self._die(EngineDeadError("the engine was shut down"))
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._socket = None
            self._context.term()


class OwnCore:
    """A core of this process's own, started on ``begin``: a child, which ends with this process at the latest."""

    identity = "0"

    def __init__(self) -> None:
        self._child: CoreChild | None = None
        self._connection: CoreConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Of the core's process."""
        return self._child.pid if self._child is not None else None

    @property
    def dead_error(self) -> BaseException | None:
        return self._connection.dead_error if self._connection is not None else None

    def begin(self, config: EngineConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._child = CoreChild(config)
        self._connection = CoreConnection(self._child.folder, self.identity)
        threading.Thread(target=self._watch, args=(self._child,), name="octavo-watch", daemon=True).start()

    async def start(
        self, config: EngineConfig, frontend: Frontend, on_outputs: OnOutputs, on_death: OnDeath
    ) -> EngineConfig:
        assert self._connection is not None, "begin comes first"
        return await self._connection.start(config, frontend, on_outputs, on_death)

    def send(self, message: EngineRequest | AbortRequest) -> None:
        if self._connection is None:
            raise EngineDeadError("the engine has not been started")
        self._connection.send(message)

    async def reset_prefix_cache(self) -> bool:
        assert self._connection is not None, "not started"
        return await self._connection.reset_prefix_cache()

    def stats(self) -> StepStats:
        return self._connection.stats() if self._connection is not None else StepStats()

    def stalled_s(self) -> float:
        return self._connection.stalled_s() if self._connection is not None else 0.0

    def stop(self) -> None:
        self._stopped = True
        if self._connection is not None:
            self._connection.stop()
        if self._child is not None:
            self._child.end()

    def _watch(self, child: CoreChild) -> None:
        """Runs in a thread of its own until the core is dead."""
        problem = None
        while problem is None and not self._stopped:
            time.sleep(WATCH_S)
            problem = child.poll()
        if self._stopped or problem is None or self._connection is None or self._loop is None:
            return
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._connection.fail, problem)
        child.end()
