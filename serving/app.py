"""The aiohttp application: routes and middlewares."""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..engine.errors import QueueFullError
from .auth import KeyCheck
from .chat import post_chat_completions
from .completions import post_completions
from .cors import cors_headers
from .dev import DEV_ROUTES
from .errors import ApiError, as_api_error
from .health import get_live, get_metrics, get_ready, get_version
from .models import get_model, get_models
from .openapi import get_openapi
from .sse import CLIENT_GONE
from .state import STATE, ServerState, request_label
from .tokenize import post_detokenize, post_tokenize


def make_app(state: ServerState) -> web.Application:
    """The application around ``state``; its routes answer 503 until the engine in ``state`` is ready."""
    middlewares = [_measure(state), _errors(state), _keys(state)]
    app = web.Application(middlewares=middlewares, client_max_size=state.options.max_request_body_bytes)
    app[STATE] = state
    app.add_routes(
        [
            web.get("/live", get_live),
            web.get("/health", get_ready),
            web.get("/ready", get_ready),
            web.get("/version", get_version),
            web.get("/metrics", get_metrics),
            web.get("/openapi.json", get_openapi),
            web.get("/v1/models", get_models),
            web.get("/v1/models/{id:.+}", get_model),
            web.post("/v1/completions", _generating(post_completions)),
            web.post("/v1/chat/completions", _generating(post_chat_completions)),
            web.post("/tokenize", _json_body(post_tokenize)),
            web.post("/detokenize", _json_body(post_detokenize)),
        ]
    )
    if state.options.dev_mode:
        app.add_routes(DEV_ROUTES)
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, streams and errors included."""
    response.headers["X-Request-Id"] = request_label(request)
    response.headers.update(cors_headers(request.app[STATE].options.cors, request))


def _measure(state: ServerState) -> Middleware:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        start_s = time.monotonic()
        status = CLIENT_GONE  # unless there is an answer
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "none"
            state.metrics.record_http(route, request.method, status, time.monotonic() - start_s)

    return measure


def _errors(state: ServerState) -> Middleware:
    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            return as_api_error(error).response()

    return errors


def _keys(state: ServerState) -> Middleware:
    check = KeyCheck(state.options.api_keys, state.options.public_metrics)

    @web.middleware
    async def keys(request: web.Request, handler: Handler) -> web.StreamResponse:
        check.check(request)
        if request.method == "OPTIONS":
            return web.Response(status=204)
        return await handler(request)

    return keys


def _json_body(handler: Handler) -> Handler:
    """Checks that the body claims to be JSON. A browser cannot send that to another origin without a preflight."""

    async def checked(request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            given = request.headers.get("Content-Type", "none")[:100]
            raise ApiError(400, f"the content type must be application/json, got {given}")
        return await handler(request)

    return checked


def _generating(handler: Handler) -> Handler:
    """Counts requests in flight, so that a shutdown can wait for their last byte."""
    checked = _json_body(handler)

    async def counted(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        state.num_in_flight += 1
        try:
            return await checked(request)
        except QueueFullError:
            state.metrics.record_rejection("queue_full")
            raise
        finally:
            state.num_in_flight -= 1

    return counted
