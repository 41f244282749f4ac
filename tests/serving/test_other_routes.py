"""Models, tokenize, health, version, openapi."""

import asyncio

import pytest

from octavo import __version__


async def test_models(running):
    models = (await running.openai().models.list()).data
    assert [model.id for model in models] == ["perm", "org/perm-alias"]
    one = await running.openai().models.retrieve("org/perm-alias")
    assert one.id == "org/perm-alias"
    assert one.model_extra["max_model_len"] == 64
    assert one.model_extra["root"] == "models/perm"


async def test_tokenize_and_back(running):
    status, answer = await running.post("/tokenize", {"prompt": "ab\u00e9", "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == [256, 97, 98, 0xC3, 0xA9]
    assert answer["count"] == 5
    assert answer["max_model_len"] == 64
    assert answer["token_strs"][:2] == ["<s>", "a"]
    status, answer = await running.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert answer["tokens"] == [97, 98]
    status, answer = await running.post("/detokenize", {"tokens": [97, 98, 0xC3, 0xA9]})
    assert (status, answer) == (200, {"prompt": "ab\u00e9"})


async def test_tokenize_messages(running):
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "perm"}
    _, answer = await running.post("/tokenize", body)
    assert bytes(answer["tokens"][1:]) == b"<user>hi<assistant>"
    _, answer = await running.post("/tokenize", body | {"add_generation_prompt": False})
    assert bytes(answer["tokens"][1:]) == b"<user>hi"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
async def test_bad_tokenize_requests(running, path, body):
    status, answer = await running.post(path, body)
    assert status == 400
    assert answer["error"]["param"] in ("prompt", "tokens")


async def test_version_and_openapi(running):
    async with running.http.get("/version") as response:
        assert await response.json() == {"version": __version__}
    async with running.http.get("/openapi.json") as response:
        description = await response.json()
    assert "temperature" in str(description["components"]["schemas"]["ChatRequest"])
    assert {"/v1/chat/completions", "/v1/models/{id}", "/health"} <= set(description["paths"])


async def status_of(running, path: str) -> int:
    async with running.http.get(path) as response:
        return response.status


async def test_the_port_opens_before_the_engine_is_ready(launch):
    running = await launch(ready=False, start_s=0.1)
    starting = asyncio.create_task(running.server.start_engine())
    assert await status_of(running, "/live") == 200
    for path in ("/health", "/ready", "/v1/models"):
        assert await status_of(running, path) == 503
    assert await status_of(running, "/metrics") == 200
    status, answer = await running.post("/v1/completions", {"prompt": "a"})
    assert status == 503
    assert "starting" in answer["error"]["message"]
    await starting
    for path in ("/health", "/ready", "/v1/models"):
        assert await status_of(running, path) == 200


async def test_a_dead_engine_is_not_healthy(launch):
    """Open streams get an error event, open requests an error, health is 503, the process still lives."""
    running = await launch(step_s=0.01)
    stream = {"prompt": "a", "max_tokens": 60, "stream": True}
    async with running.http.post("/v1/completions", json=stream) as response:
        await response.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(running.post("/v1/completions", {"prompt": "a", "max_tokens": 60}))
        await asyncio.sleep(0.02)
        running.engine.die()
        rest = (await response.content.read()).decode()
    assert rest.count('"error"') == 1
    assert "[DONE]" not in rest
    assert (await waiting)[0] == 503
    assert await status_of(running, "/health") == 503
    assert await status_of(running, "/live") == 200
    assert (await running.post("/v1/completions", {"prompt": "a"}))[0] == 503
