"""GET /openapi.json: a short description, made from the request structs so that it cannot drift from them."""

from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from .protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .protocol.responses import encode_json

_POSTS: dict[str, tuple[str, type]] = {
    "/v1/completions": ("Continues prompts", CompletionRequest),
    "/v1/chat/completions": ("Answers a conversation", ChatRequest),
    "/tokenize": ("Text or messages to token ids", TokenizeRequest),
    "/detokenize": ("Token ids to text", DetokenizeRequest),
}
_GETS = {
    "/live": "200 as long as the process answers",
    "/health": "200 when requests can be served, else 503",
    "/ready": "The same as /health",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/v1/models": "The names that the server answers to",
    "/v1/models/{id}": "One of them",
}


def openapi() -> dict[str, Any]:
    schemas, components = msgspec.json.schema_components(
        [request for _, request in _POSTS.values()], ref_template="#/components/schemas/{name}"
    )
    failure = {"description": 'An error: {"error": {"message", "type", "param", "code"}}'}
    paths: dict[str, Any] = {}
    for path, text in _GETS.items():
        paths[path] = {"get": {"summary": text, "responses": {"200": {"description": "OK"}, "4XX": failure}}}
        if "{id}" in path:
            parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path]["get"]["parameters"] = [parameter]
    for (path, (text, _)), schema in zip(_POSTS.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        answers = {"200": {"description": "OK"}, "4XX": failure, "5XX": failure}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": answers}}
    info = {"title": "Octavo", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


async def get_openapi(request: web.Request) -> web.Response:
    return web.Response(body=encode_json(openapi()), content_type="application/json")
