"""SIGTERM as Ctrl-C, for commands that have something to clean up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def ends_cleanly() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143) in the main thread. Does nothing in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_CODE)
