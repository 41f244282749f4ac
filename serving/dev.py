"""Routes for development, as in vLLM: they change the engine, so they exist only when they are asked for."""

from aiohttp import web

from .errors import ApiError
from .state import STATE


async def post_reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: forgets what is cached on the device and in host memory. 409 while requests run."""
    if request.query.get("reset_running_requests", "false").lower() not in ("false", "0"):
        raise ApiError(400, "reset_running_requests is not available yet", "reset_running_requests")
    engine = request.app[STATE].require_engine()
    if not await engine.reset_prefix_cache():
        raise ApiError(409, "the prefix cache is in use by requests that run; nothing was reset")
    return web.Response()


DEV_ROUTES = [web.post("/reset_prefix_cache", post_reset_prefix_cache)]
