"""One API process: ``python -m octavo.serving.api_process``, started by the supervisor, never by hand.

Its orders come line by line over its standard input (``orders``), the first being ``ApiStart``. It lives no longer than
whoever holds the other end.
"""

import asyncio
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from typing import Any

from ..engine.args import EngineArgs
from ..engine.metrics import StatSink
from .listening import remove_unix_socket
from .logging import set_up_logging
from .metrics import ServerMetrics
from .orders import DEAD, STOP, ApiStart, decode_start
from .server import Server


def main() -> int:
    """Serves until told to stop; returns the exit code."""
    # Who started this process says when it stops: a signal to the whole group must not cut running requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = _Lines(sys.stdin.fileno())
    first = orders.next()
    if first is None:
        return 1
    start = decode_start(first)
    set_up_logging(start.log_level)
    asyncio.run(_serve(start, orders))
    return 1


async def _serve(start: ApiStart, orders: "_Lines") -> None:
    core = _load("..engine.core_client").CoreConnection(start.folder, str(start.index))

    def make_engine(args: EngineArgs, stat_sink: StatSink) -> Any:
        # Importing it brings in transformers, which takes a second; the port is open meanwhile.
        return _load("..engine.async_llm").AsyncLLM(args, stat_sink=stat_sink, core=core)

    metrics = ServerMetrics(shared_folder=start.metrics_folder, index=start.index, pids=start.pids)
    sockets = [socket.socket(fileno=fd) for fd in start.socket_fds]
    server = Server(start.args, start.options, make_engine, metrics=metrics, sockets=sockets, is_first=start.index == 0)
    loop = asyncio.get_running_loop()

    def obey(order: bytes) -> None:
        if order == STOP:
            server.request_stop()
        elif order.startswith(DEAD):
            core.fail(order.removeprefix(DEAD).decode())

    def listen() -> None:
        while (order := orders.next()) is not None:
            loop.call_soon_threadsafe(obey, order)
        # The supervisor is gone: so is the core, and nobody is left to clean up.
        shutil.rmtree(start.folder, ignore_errors=True)
        remove_unix_socket(start.options.uds)
        os._exit(1)

    threading.Thread(target=listen, name="octavo-orders", daemon=True).start()
    code = await server.run()
    logging.shutdown()
    os._exit(code)  # threads that make text may not end for a while


class _Lines:
    """Lines of a file descriptor, read without a buffer that interpreter and threads would share."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self) -> bytes | None:
        """The next line without its end; None at the end of file."""
        while b"\n" not in self._rest:
            data = os.read(self._fd, 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _load(module: str) -> Any:
    """A module of this package that is too heavy to import before the port answers."""
    return importlib.import_module(module, __package__)


if __name__ == "__main__":
    sys.exit(main())
