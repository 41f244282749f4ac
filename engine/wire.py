"""What crosses between the core's process and the processes around it: msgpack over a Unix socket, never pickle.

The core binds a ROUTER at ``ipc://FOLDER/core.sock``; each API process connects a DEALER whose identity is its number
in decimal ASCII. A message is two frames: one byte that says its kind, and the message as msgpack.

    API process                                  core
    Hello (where the model is, ids it can take)  →
                                                 ←  Log (a line of the core's log; to the first process only)
                                                 ←  Ready, or Failed and the end
    EngineRequest, AbortRequest, Call            →
                                                 ←  StepOutputs: one a step, with this process's choices only
                                                 ←  Result, of a Call
                                                 ←  Died: nothing more will come

The part of a request's id before the first ``-`` is the identity of the process that sent it: that is where its
outputs go. The process with identity 0 gets a message for every step, others for steps that concern them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from .config import EngineConfig
from .errors import ConfigError
from .messages import AbortRequest, EngineRequest, StepOutputs

SOCKET_NAME = "core.sock"
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit on a Unix socket's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStart:
    """How a core is to start: one line of JSON on its standard input, which stays open as long as its owner lives."""

    config: EngineConfig
    folder: str
    """A private folder for the socket and the figures of ``stats_board``."""
    log_level: int = 30
    """Of this package's log lines, as ``logging`` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An API process is there. The core starts with the first one's answers and sends Ready to each."""

    model_path: str
    """The folder or file that the model was found in."""
    vocab_size: int | None
    """Of the tokenizer; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    config: EngineConfig
    """With all derived values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The core cannot start."""

    message: str
    is_config_error: bool
    """The options or the checkpoint are at fault, and the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    name: str
    level: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Asks for one of the core's own functions; ``Result`` with the same number is the answer."""

    call_id: int
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    call_id: int
    value: bool | int | float | str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The core's loop has failed."""

    message: str


ToCore = Hello | EngineRequest | AbortRequest | Call
FromCore = Ready | Failed | Log | StepOutputs | Result | Died
Frames = tuple[bytes, bytes]

_KINDS: dict[type, bytes] = {
    Hello: b"h",
    EngineRequest: b"r",
    AbortRequest: b"a",
    Call: b"c",
    Ready: b"R",
    Failed: b"F",
    Log: b"L",
    StepOutputs: b"O",
    Result: b"V",
    Died: b"D",
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[bytes, msgspec.msgpack.Decoder] = {
    kind: msgspec.msgpack.Decoder(type_) for type_, kind in _KINDS.items()
}


def encode(message: ToCore | FromCore) -> Frames:
    """The frames of a message, without an identity."""
    return _KINDS[type(message)], _ENCODER.encode(message)


def decode(frames: Sequence[bytes]) -> ToCore | FromCore:
    """The message of two frames. Raises ValueError for anything else."""
    if len(frames) != 2 or frames[0] not in _DECODERS:
        raise ValueError(f"{len(frames)} frames that are no message")
    try:
        return _DECODERS[frames[0]].decode(frames[1])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a message: {error}") from error


def encode_start(start: CoreStart) -> bytes:
    """One line for the core's standard input."""
    return msgspec.json.encode(start) + b"\n"


def decode_start(line: bytes) -> CoreStart:
    return msgspec.json.decode(line, type=CoreStart)


def client_of(request_id: str) -> bytes:
    """The identity of the process that a request came from."""
    return request_id.partition("-")[0].encode()


def socket_address(folder: str | Path) -> str:
    """Raises ConfigError when the folder's path is too long for a socket in it."""
    path = str(Path(folder) / SOCKET_NAME)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"the path {path} is too long for a socket; set TMPDIR to a shorter folder")
    return f"ipc://{path}"


def bind_core(context: "zmq.Context[zmq.Socket[bytes]]", folder: str | Path) -> "zmq.Socket[bytes]":
    """The core's end. It queues without limit: what can wait there is bounded by the requests that were let in."""
    socket = context.socket(zmq.ROUTER)
    _set_no_limits(socket)
    socket.bind(socket_address(folder))
    return socket


def connect_client(
    context: "zmq.Context[zmq.Socket[bytes]]", folder: str | Path, identity: bytes
) -> "zmq.Socket[bytes]":
    """An API process's end; it may connect before the core has bound its own."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    _set_no_limits(socket)
    socket.connect(socket_address(folder))
    return socket


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message is there. Asks the socket itself: its file descriptor tells only of changes."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _set_no_limits(socket: "zmq.Socket[bytes]") -> None:
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
