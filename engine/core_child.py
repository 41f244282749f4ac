"""A core's process as its owner sees it: started with a private folder, watched, ended, leaving nothing behind."""

import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from .config import WRITER_WAIT_S, EngineConfig
from .stats_board import StatsBoard, create_board
from .wire import CoreStart, encode_start, socket_address

logger = logging.getLogger(__name__)

PACKAGE = __name__.split(".")[0]
END_TIMEOUT_S = 2.0
"""How long a core may take to end by itself."""

SUSPICION_S = 1.0
"""A core that seems to have stalled gets this much time to show that it has not."""


def describe_exit(returncode: int) -> str:
    """ "was killed by SIGKILL", "ended with exit status 1"."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def core_command() -> list[str]:
    """Starts a core. -P: what lies in the current folder is not to be imported instead of what is installed."""
    return [sys.executable, "-P", "-m", f"{PACKAGE}.engine.core_process"]


class CoreChild:
    """Starts ``python -m octavo.engine.core_process``. Raises ConfigError when no socket can be made.

    The child ends when ``end`` is called or this process dies: it watches the pipe that is its standard input. It is
    in a process group of its own, so that Ctrl-C in a terminal reaches only its owner.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        self._step_timeout_s = config.engine_step_timeout_s
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._suspected_s: float | None = None
        try:
            socket_address(self.folder)
            create_board(self.folder)
            self._board = StatsBoard(self.folder)
            self._process = subprocess.Popen(core_command(), stdin=subprocess.PIPE, process_group=0)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        level = logging.getLogger(PACKAGE).getEffectiveLevel()
        start = CoreStart(config=config, folder=str(self.folder), log_level=level)
        with suppress(BrokenPipeError):  # it has died already, which ``poll`` tells
            assert self._process.stdin is not None
            self._process.stdin.write(encode_start(start))
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> str | None:
        """Why the core is dead, or None while it lives. Kills one that has not finished a step for too long."""
        returncode = self._process.poll()
        if returncode is None:
            if not self._is_stalled():
                return None
            self._process.kill()
            self._process.wait()
            self._problem = f"the core finished no step within {self._step_timeout_s:g} s (--engine-step-timeout)"
        else:
            self._problem = self._problem or f"the core's process {describe_exit(returncode)}"
        return self._problem

    def _is_stalled(self) -> bool:
        """Whether the core has done nothing for too long.

        That is asked twice: when all processes were suspended together, this one may be the first to go on.
        """
        if self._board.read().stalled_s() <= self._step_timeout_s:
            self._suspected_s = None
            return False
        now_s = time.monotonic()
        self._suspected_s = self._suspected_s or now_s
        return now_s - self._suspected_s > SUSPICION_S

    def end(self) -> None:
        """Ends the child, by force if it takes too long, and removes its folder. From any thread, and again."""
        with self._lock:
            # One that works may be writing compiled programs.
            timeout_s = END_TIMEOUT_S if self._problem else END_TIMEOUT_S + WRITER_WAIT_S
            self._problem = self._problem or "the core was stopped"
            with suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
