"""What the supervisor tells an API process: lines over its standard input, whose end means that nobody is there."""

from dataclasses import dataclass

import msgspec

from ..engine.args import EngineArgs
from .options import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStart:
    """All that an API process has to know, as one line of JSON."""

    args: EngineArgs
    options: ServerOptions
    index: int
    """From 0 on. What has to be told once is told by process 0."""
    folder: str
    """The private folder of the core's socket."""
    metrics_folder: str | None
    """Where several API processes share their counters; None for a single one."""
    pids: list[int]
    """All processes of this server."""
    socket_fds: list[int]
    """Inherited listening sockets."""
    log_level: str


STOP = b"stop"
"""The order to stop; the second one forces."""
DEAD = b"dead "
"""The start of the news that the engine, or another process, has died; the rest says how."""


def encode_start(start: ApiStart) -> bytes:
    return msgspec.json.encode(start)


def decode_start(line: bytes) -> ApiStart:
    return msgspec.json.decode(line, type=ApiStart)
