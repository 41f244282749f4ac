"""The core as a process: ``python -m octavo.engine.core_process``, started by ``core_child``, never by hand.

It reads one line from its standard input (``wire.CoreStart``) and lives no longer than whoever holds the other end.
Nothing in here imports a tokenizer: text is made by the processes around it.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import traceback

from .core_server import CoreServer, LogForwarder
from .errors import ConfigError
from .find_model import find_model
from .launch import launch_core
from .wire import CoreStart, decode_start

PACKAGE = __name__.split(".")[0] if __name__ != "__main__" else (__package__ or "").split(".")[0]


def main() -> int:
    """Runs the core until its owner is gone; returns 1 when it failed."""
    # Who started this process says when it stops: a signal to the whole group must not cut running requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    start = decode_start(line)
    threading.Thread(target=_end_with_owner, args=(start.folder,), name="octavo-owner", daemon=True).start()
    server = CoreServer(start.folder)
    _set_up_logging(server, start.log_level)
    try:
        _run(server, start)
    except BaseException as error:
        is_config_error = isinstance(error, ConfigError)
        if not is_config_error:
            logging.getLogger(PACKAGE).exception("the engine's core failed")
        if not server.fail(error, is_config_error=is_config_error):
            traceback.print_exc()
    server.close()
    return 1


def _run(server: CoreServer, start: CoreStart) -> None:
    hello = server.wait_for_hello()
    core, config = launch_core(start.config, find_model(start.config.model, hello.model_path), hello.vocab_size)
    server.serve(core, config)


def _end_with_owner(folder: str) -> None:
    """Ends this process, in whatever it is, once the owner has closed its end of the pipe or died."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _set_up_logging(server: CoreServer, level: int) -> None:
    root = logging.getLogger()
    root.handlers[:] = [LogForwarder(server)]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(PACKAGE).setLevel(level)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that compile may go on for minutes
