"""The life of an API process: the port opens, the engine starts behind it, requests are served, one way to stop."""

import asyncio
import gc
import logging
import socket
import ssl
from collections.abc import Sequence

from aiohttp import web

from ..engine.args import EngineArgs
from ..engine.errors import ConfigError, EngineDeadError
from .access_log import AccessLog, drop_bad_requests
from .app import make_app
from .engine_client import EngineClient, EngineFactory
from .listening import BACKLOG, open_sockets
from .logging import RequestLog, log_stats_forever
from .metrics import ServerMetrics
from .options import ServerOptions
from .state import ServerState

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How often the engine's death and progress are looked at."""
ABORT_WAIT_S = 2.0
"""How long aborted requests may take to tell their clients."""


class Server:
    """One server. ``run`` returns the exit code: 0 after a graceful stop, 1 after any failure or a forced stop.

    ``sockets`` are those to listen on; None opens what the options say. ``is_first`` is false for all but one of
    several processes: what has to be logged once is logged by that one.
    """

    def __init__(
        self,
        args: EngineArgs,
        options: ServerOptions,
        make_engine: EngineFactory,
        *,
        metrics: ServerMetrics | None = None,
        sockets: Sequence[socket.socket] | None = None,
        is_first: bool = True,
    ) -> None:
        self.options = options
        self.metrics = metrics or ServerMetrics()
        self.state = ServerState(options, self.metrics)
        self._args = args
        self._make_engine = make_engine
        self._sockets = sockets
        self._is_first = is_first
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._started = False
        self._drained = True
        self._runner: web.AppRunner | None = None

    async def run(self) -> int:
        """Opens the port, starts the engine and serves until stopped."""
        try:
            await self.open_port()
        except OSError as error:
            logger.error("cannot listen: %s", error)
            return 1
        reporter = asyncio.create_task(log_stats_forever(self.state.stats, self.options.stats_interval_s))
        if self.options.disable_log_stats or not self._is_first:
            reporter.cancel()
        try:
            return await self._serve()
        finally:
            reporter.cancel()
            await self.close()

    def request_stop(self) -> None:
        """The first call drains, the second one forces."""
        if self._stop.is_set():
            self._force.set()
            return
        logger.info("stopping: %d requests are in flight", self.state.num_in_flight)
        self.state.draining = True
        self._stop.set()

    async def open_port(self) -> None:
        """Listens. Raises OSError. With port 0, ``bound_port`` tells which it is."""
        # handler_cancellation: a client that leaves cancels its handler, which aborts its request (rule R23).
        self.app = make_app(self.state)
        logging.getLogger("aiohttp.server").addFilter(drop_bad_requests)
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            shutdown_timeout=ABORT_WAIT_S,
            access_log=None if self.options.disable_access_log else logger,
            access_log_class=AccessLog,
        )
        await self._runner.setup()
        context = _ssl_context(self.options)
        for one in self._sockets or open_sockets(self.options)[0]:
            await web.SockSite(self._runner, one, ssl_context=context, backlog=BACKLOG).start()

    @property
    def bound_port(self) -> int:
        assert self._runner is not None
        return self._runner.addresses[0][1]

    async def start_engine(self) -> None:
        """Makes and starts the engine. Raises ConfigError."""
        sink = self.metrics if self.options.disable_log_stats else RequestLog(self.metrics)
        # Making it imports the tokenizers, which takes a second.
        engine = await asyncio.to_thread(self._make_engine, self._args, sink)
        self.state.engine = engine
        await engine.start()
        self._started = True
        self.metrics.bind(engine.config, engine.stats)
        if self._is_first:
            logger.info("ready: serving %s", ", ".join(engine.config.served_model_names))

    async def _serve(self) -> int:
        starting = asyncio.create_task(self.start_engine())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return 0
            try:
                await starting
            except (ConfigError, EngineDeadError) as error:
                logger.error("cannot start: %s", error)
                return 1
            except Exception:
                logger.exception("cannot start")
                return 1
            assert self.state.engine is not None
            # What is there now stays, vocabularies above all: the collector need not look through it again and again.
            gc.collect()
            gc.freeze()
            return await self._watch(self.state.engine, stopping)
        finally:
            stopping.cancel()
            starting.cancel()

    async def _watch(self, engine: EngineClient, stopping: "asyncio.Task[bool]") -> int:
        """Until a stop is asked for or the engine dies."""
        while not stopping.done():
            if engine.dead_error is not None:
                logger.error("the engine has stopped: %r", engine.dead_error)
                await self._wait_in_flight(ABORT_WAIT_S)
                return 1
            self.state.progress.update(engine.stats(), engine.stalled_s())
            await asyncio.wait({stopping}, timeout=POLL_S)
        deadline_s = asyncio.get_running_loop().time() + self.options.shutdown_timeout_s
        self._drained = drained = await self._wait_in_flight(self.options.shutdown_timeout_s)
        if not drained:
            logger.warning("%d requests did not end in time and are aborted", self.state.num_in_flight)
            await asyncio.gather(*(engine.abort(request_id) for request_id in list(self.state.active_ids)))
            await self._wait_in_flight(ABORT_WAIT_S, forced=True)
        elif engine.dead_error is None:
            await engine.wait_drained(ABORT_WAIT_S)
            if self.options.api_server_count > 1:
                await self._wait_for_others(engine, deadline_s)
        return 1 if self._force.is_set() or engine.dead_error is not None else 0

    async def _wait_in_flight(self, timeout_s: float, forced: bool = False) -> bool:
        """Waits until nothing is in flight; False when time is up or, unless ``forced`` already, a stop is forced."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self.state.num_in_flight:
            if loop.time() >= deadline_s or (self._force.is_set() and not forced):
                return False
            await asyncio.sleep(min(0.02, timeout_s))
        return True

    async def _wait_for_others(self, engine: EngineClient, deadline_s: float) -> None:
        """Until the core has nothing more to do for other API processes: whoever connects here meanwhile is told 503,
        not refused."""
        loop = asyncio.get_running_loop()
        while loop.time() < deadline_s and not self._force.is_set() and engine.dead_error is None:
            stats = engine.stats()
            if not stats.num_running + stats.num_waiting:
                return
            await asyncio.sleep(0.02)

    @property
    def must_exit(self) -> bool:
        """A stop before ready, a late or a forced one does not wait for threads that may compile for minutes."""
        return self._stop.is_set() and (self._force.is_set() or not self._drained or not self._started)

    async def close(self) -> None:
        """Closes the port and every connection, then the engine."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self.state.engine is not None:
            shutdown = asyncio.get_running_loop().run_in_executor(None, self.state.engine.shutdown)
            await asyncio.wait({shutdown}, timeout=ABORT_WAIT_S if self.must_exit else None)


def _ssl_context(options: ServerOptions) -> ssl.SSLContext | None:
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    return context
