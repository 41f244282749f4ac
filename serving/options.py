"""Options of the HTTP side, as plain data: reading the command line needs no web framework."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CorsPolicy:
    """``origins`` empty: no page of another origin may read answers; ``*``: any may."""

    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Times in seconds, sizes in bytes."""

    host: str | None = None
    """None: all interfaces."""
    port: int = 8000
    uds: str | None = None
    """A Unix socket's path, instead of host and port."""
    api_server_count: int = 1
    """Processes that take requests and make text, over one core."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: Sequence[str] = ()
    public_metrics: bool = False
    """/metrics without a key."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    max_request_body_bytes: int = 32 << 20
    max_prompts: int = 1024
    """Most prompts in one completions request."""
    max_queued: int = 16384
    """Most choices that may wait beyond those that run; more are answered 503 (rule R22)."""
    shutdown_timeout_s: float = 25.0
    """How long running requests may go on after SIGTERM."""
    stall_timeout_s: float = 60.0
    """A client that takes, or while it uploads sends, nothing for this long is dropped."""
    stuck_timeout_s: float = 10.0
    """/health is 503 after this long with work and no progress."""
    stats_interval_s: float = 10.0
    disable_log_stats: bool = False
    disable_access_log: bool = False
    dev_mode: bool = False
    """Routes for development (``serving.dev``) are there."""
