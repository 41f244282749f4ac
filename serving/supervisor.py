"""``octavo serve``: opens the port, starts the core and the API processes, and ends all of them together.

It imports neither jax nor a web framework. Children are started by command line and configured over their standard
input, whose end of file tells them when this process is gone, however it went.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from ..engine.args import EngineArgs
from ..engine.config import EngineConfig
from ..engine.core_child import CoreChild, describe_exit
from ..engine.errors import ConfigError
from .file_limit import raise_file_limit
from .listening import open_sockets, port_of, remove_unix_socket
from .options import ServerOptions
from .orders import DEAD, STOP, ApiStart, encode_start

logger = logging.getLogger(__name__)

WATCH_S = 0.1
"""How often children are looked at when no signal says that one has ended."""
DEATH_WAIT_S = 5.0
"""How long API processes may take to tell their clients that the engine has died."""
STOP_MARGIN_S = 10.0
"""Longer than ``--shutdown-timeout`` by this, an API process that has not stopped is killed."""
METRICS_FOLDER = "metrics"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Supervisor:
    """``run`` returns the exit code: 0 after a graceful stop, 1 after any failure or a forced stop."""

    def __init__(self, args: EngineArgs, options: ServerOptions, log_level: str) -> None:
        self._args = args
        self._options = options
        self._log_level = log_level
        self._core: CoreChild | None = None
        self._apis: list[subprocess.Popen[bytes]] = []
        self._num_signals = 0

    def run(self) -> int:
        """Serves until stopped."""
        options = self._options
        raise_file_limit()
        try:
            sockets = open_sockets(options, options.api_server_count)
        except OSError as error:
            logger.error("cannot listen: %s", error)
            return 1
        port = port_of(sockets[0])
        where = options.uds if port is None else f"port {port}"
        logger.info("listening on %s; /health is 200 once the engine is ready", where)
        with _Wakeups(self._note_signal) as wakeups:
            try:
                self._start(sockets)
                return self._watch(wakeups)
            except ConfigError as error:
                logger.error("cannot start: %s", error)
                return 1
            finally:
                self._end()

    def _note_signal(self) -> None:
        self._num_signals += 1

    def _start(self, sockets: list[list[socket.socket]]) -> None:
        self._core = CoreChild(EngineConfig.from_args(self._args))
        metrics_folder = None
        if len(sockets) > 1:
            metrics_folder = self._core.folder / METRICS_FOLDER
            metrics_folder.mkdir()
            # The metrics' library takes this from the environment only, when it is imported.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_folder)
        command = [sys.executable, "-P", "-m", f"{__name__.split('.')[0]}.serving.api_process"]
        for mine in sockets:
            fds = tuple(one.fileno() for one in mine)
            self._apis.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, process_group=0))
        pids = [os.getpid(), self._core.pid, *(api.pid for api in self._apis)]
        for index, (api, mine) in enumerate(zip(self._apis, sockets, strict=True)):
            start = ApiStart(
                args=self._args,
                options=self._options,
                index=index,
                folder=str(self._core.folder),
                metrics_folder=None if metrics_folder is None else str(metrics_folder),
                pids=pids,
                socket_fds=[one.fileno() for one in mine],
                log_level=self._log_level,
            )
            _tell(api, encode_start(start))
        for one in {one for mine in sockets for one in mine}:
            one.close()

    def _watch(self, wakeups: "_Wakeups") -> int:
        """Until all API processes have stopped, or any process has died."""
        assert self._core is not None
        num_told = 0
        deadline_s = None
        while True:
            wakeups.wait(WATCH_S)
            while num_told < self._num_signals:
                self._stop(num_told)
                wait_s = self._options.shutdown_timeout_s if num_told == 0 else 0.0
                deadline_s = time.monotonic() + wait_s + STOP_MARGIN_S
                num_told += 1
            codes = [api.poll() for api in self._apis]
            if num_told and None not in codes:
                return 0 if not any(codes) else 1
            problem = self._core.poll() or self._find_dead(codes, num_told)
            if problem is not None:
                return self._fail(problem)
            if deadline_s is not None and time.monotonic() > deadline_s:
                logger.error("an API process did not stop in time")
                return 1

    def _find_dead(self, codes: list[int | None], num_told: int) -> str | None:
        """An API process that ended without being told to stop, or otherwise than it should: 0, or 1 when forced."""
        expected = range(min(num_told, 2))
        for index, code in enumerate(codes):
            if code is not None and code not in expected:
                return f"API process {index} {describe_exit(code)}"
        return None

    def _stop(self, num_told: int) -> None:
        if num_told == 0:
            logger.info(
                "stopping: running requests may go on for %g s; once more stops at once",
                self._options.shutdown_timeout_s,
            )
        else:
            logger.warning("stopping at once")
        for api in self._apis:
            _tell(api, STOP)

    def _fail(self, problem: str) -> int:
        logger.error("%s; everything ends", problem)
        for api in self._apis:
            _tell(api, DEAD + problem.encode())
        deadline_s = time.monotonic() + DEATH_WAIT_S
        for api in self._apis:
            with suppress(subprocess.TimeoutExpired):
                api.wait(max(0.0, deadline_s - time.monotonic()))
        return 1

    def _end(self) -> None:
        """Leaves nothing behind."""
        for api in self._apis:
            if api.poll() is None:
                api.kill()
            api.wait()
        if self._core is not None:
            self._core.end()
        remove_unix_socket(self._options.uds)


def _tell(api: "subprocess.Popen[bytes]", order: bytes) -> None:
    assert api.stdin is not None
    with suppress(BrokenPipeError):
        api.stdin.write(order + b"\n")
        api.stdin.flush()


class _Wakeups:
    """Waits that end early by a signal: SIGTERM and SIGINT, which ``on_stop`` is told, and the end of a child."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop

    def __enter__(self) -> "_Wakeups":
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        if select.select([self._reader], [], [], timeout_s)[0]:
            with suppress(BlockingIOError):
                self._reader.recv(4096)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._on_stop()


def run_supervisor(args: EngineArgs, options: ServerOptions, log_level: str) -> int:
    """Serves until stopped; returns the exit code."""
    return Supervisor(args, options, log_level).run()
