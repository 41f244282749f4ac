"""GET /v1/models and /v1/models/{id}: one card per name that the server answers to."""

from typing import Any

from aiohttp import web

from .engine_client import EngineClient
from .protocol.responses import encode_json
from .state import STATE


async def get_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.require_engine()
    cards = [_card(engine, name, state.created) for name in engine.config.served_model_names]
    body = encode_json({"object": "list", "data": cards})
    return web.Response(body=body, content_type="application/json")


async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine, name = state.require_model(request.match_info["id"])
    return web.Response(body=encode_json(_card(engine, name, state.created)), content_type="application/json")


def _card(engine: EngineClient, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "octavo",
        "root": str(engine.config.model_path),
        "parent": None,
        "max_model_len": engine.config.max_model_len,
        "permission": [],
    }
