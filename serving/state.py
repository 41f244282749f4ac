"""What all handlers share: the options, the engine once it is there, and what is in flight."""

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from ..engine.messages import StepStats
from .cors import CorsPolicy
from .engine_client import EngineClient
from .errors import ApiError, unavailable

if TYPE_CHECKING:
    from .metrics import ServerMetrics

_SAFE_LABEL = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}\Z")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP side. Times in seconds, sizes in bytes."""

    host: str | None = None
    """None: all interfaces."""
    port: int = 8000
    uds: str | None = None
    """A Unix socket's path, instead of host and port."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: Sequence[str] = ()
    public_metrics: bool = False
    """/metrics without a key."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    max_request_body_bytes: int = 32 << 20
    max_prompts: int = 1024
    """Most prompts in one completions request."""
    shutdown_timeout_s: float = 25.0
    """How long running requests may go on after SIGTERM."""
    stall_timeout_s: float = 60.0
    """A streaming client that takes nothing for this long is dropped."""
    stats_interval_s: float = 10.0
    disable_log_stats: bool = False
    disable_access_log: bool = False


class ServerState:
    """Changed on the event loop only."""

    def __init__(self, options: ServerOptions, metrics: "ServerMetrics") -> None:
        self.options = options
        self.metrics = metrics
        self.engine: EngineClient | None = None
        """None until it has been made; it still has to start then."""
        self.created = int(time.time())
        self.draining = False
        self.num_in_flight = 0
        """Requests that generate, from their arrival until the last byte."""
        self.active_ids: set[str] = set()
        """The engine's ids of what is being generated."""

    @property
    def ready(self) -> bool:
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """Empty when requests can be served."""
        if self.draining:
            return "the server is shutting down"
        if self.engine is None:
            return "the server is starting"
        if self.engine.dead_error is not None:
            return "the engine has stopped"
        return "" if self.engine.ready else "the server is starting"

    def require_engine(self) -> EngineClient:
        """The engine, if requests can be served. Raises ApiError 503."""
        reason = self.why_not_ready()
        if reason or self.engine is None:
            raise unavailable(reason)
        return self.engine

    def require_model(self, name: str | None) -> tuple[EngineClient, str]:
        """The engine, and the model's name as the client calls it. Raises ApiError 503, or 404 for another model."""
        engine = self.require_engine()
        names = engine.config.served_model_names
        if name is None:
            return engine, names[0]
        if name not in names:
            raise ApiError(404, f"the model {name[:200]!r} is not served here; served: {', '.join(names)}", "model")
        return engine, name

    def stats(self) -> StepStats | None:
        """The engine's figures now; None before it has started."""
        return self.engine.stats() if self.engine is not None and self.engine.ready else None


STATE = web.AppKey("STATE", ServerState)
_LABEL = web.RequestKey("request_label", str)


def request_label(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if short and plain, else an id of our own; never an engine's id (rule R22)."""
    label = request.get(_LABEL)
    if label is None:
        given = request.headers.get("X-Request-Id", "")
        label = given if _SAFE_LABEL.match(given) else new_id()
        request[_LABEL] = label
    return label


def new_id() -> str:
    return uuid.uuid4().hex
