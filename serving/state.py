"""What all handlers share: the options, the engine once it is there, and what is in flight."""

import asyncio
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from ..engine.errors import QueueFullError, RequestError
from ..engine.messages import StepStats
from .engine_client import EngineClient
from .errors import ApiError, unavailable
from .options import ServerOptions
from .progress import ProgressWatch

if TYPE_CHECKING:
    from .metrics import ServerMetrics

_SAFE_LABEL = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}\Z")


class ServerState:
    """Changed on the event loop only."""

    def __init__(self, options: ServerOptions, metrics: "ServerMetrics") -> None:
        self.options = options
        self.metrics = metrics
        self.engine: EngineClient | None = None
        """None until it has been made; it still has to start then."""
        self.created = int(time.time())
        self.draining = False
        self.progress = ProgressWatch(options.stuck_timeout_s)
        self.num_in_flight = 0
        """Requests that generate, from their arrival until the last byte."""
        self.active_ids: set[str] = set()
        """The engine's ids of what is being generated."""
        self.num_choices = 0
        """Choices of all of these, running or queued."""

    def why_not_ready(self) -> str:
        """Empty when requests can be served."""
        if self.draining:
            return "the server is shutting down"
        if self.engine is None:
            return "the server is starting"
        if self.engine.dead_error is not None:
            return "the engine has stopped"
        return "" if self.engine.ready else "the server is starting"

    def why_unhealthy(self) -> str:
        """As ``why_not_ready``, and also while nothing gets on. Requests are still taken then: it may pass."""
        return self.why_not_ready() or ("the engine makes no progress" if self.progress.stuck else "")

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

    @contextmanager
    def admit(self, engine: EngineClient, num_choices: int) -> Iterator[None]:
        """Counts ``num_choices`` while they are open. Raises QueueFullError, or RequestError for more than ever fit."""
        limit = engine.config.max_num_seqs + self.options.max_queued
        if num_choices > limit:
            raise RequestError(f"this asks for {num_choices} choices at once, at most {limit} are allowed", "n")
        if self.num_choices + num_choices > limit:
            raise QueueFullError(f"the queue is full: {self.num_choices} choices are running or waiting")
        self.num_choices += num_choices
        try:
            yield
        finally:
            self.num_choices -= num_choices

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


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError 408 when the client stops sending it."""
    try:
        async with asyncio.timeout(request.app[STATE].options.stall_timeout_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "the request body did not arrive in time") from None
