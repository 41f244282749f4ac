"""GET /live, /health, /ready, /version, /metrics: answers about the server itself (rule R25)."""

from aiohttp import web

from .. import __version__
from .errors import unavailable
from .protocol.responses import encode_json
from .state import STATE


async def get_live(request: web.Request) -> web.Response:
    """200 as long as the process answers, also while it loads or compiles."""
    return web.Response()


async def get_ready(request: web.Request) -> web.Response:
    """200 only when requests can be served: not while starting, draining, stuck or dead. Also serves /health."""
    reason = request.app[STATE].why_unhealthy()
    if reason:
        raise unavailable(reason)
    return web.Response()


async def get_version(request: web.Request) -> web.Response:
    return web.Response(body=encode_json({"version": __version__}), content_type="application/json")


async def get_metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[STATE].metrics.render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
