"""The wire form of streams (R8), clients that leave, and clients that do not read."""

import asyncio
import json
import random
import socket

import pytest

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


async def events(response) -> list[str]:
    """The data of every event; the frames must be of the plainest form."""
    text = await response.text()
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(item.startswith("data: ") and "\n" not in item for item in frames)
    return [item.removeprefix("data: ") for item in frames]


@pytest.mark.parametrize("path", PATHS)
async def test_headers_and_end(running, path):
    async with running.http.post(path, json=PATHS[path] | {"stream": True, "max_tokens": 3}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-Request-Id"]
        data = await events(response)
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "in_end", "in_each"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
async def test_usage(running, path, options, in_end, in_each):
    """The value counts, not the presence; the last chunk has no choices."""
    body = PATHS[path] | {"stream": True, "max_tokens": 3, "stream_options": options}
    async with running.http.post(path, json=body) as response:
        chunks = [json.loads(item) for item in (await events(response))[:-1]]
    ends = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(ends) == int(in_end)
    if in_end:
        assert chunks[-1] is ends[0]
        assert ends[0]["usage"]["completion_tokens"] == 3
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"] and chunk.get("usage")]
    assert bool(counts) is in_each
    assert counts == sorted(counts)
    if in_each:
        assert counts[-1] == 3


async def test_held_text_counts_in_usage(running):
    body = {"prompt": "a", "max_tokens": 9, "stop": "bcdefghijklmnop", "stream_options": {"include_usage": True}}
    async with running.http.post("/v1/completions", json=body | {"stream": True}) as response:
        chunks = [json.loads(item) for item in (await events(response))[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "bcdefghij"
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert len(chunks) == 2, "nothing is sent while all is held back"


async def test_many_streams_end_properly(running):
    rng = random.Random(0)

    async def one(length: int) -> None:
        body = {"prompt": [97], "stream": True, "max_tokens": length}
        async with running.http.post("/v1/completions", json=body) as response:
            data = await events(response)
        assert data.count("[DONE]") == 1
        assert data[-1] == "[DONE]"
        text = "".join(json.loads(item)["choices"][0]["text"] for item in data[:-1])
        assert text == ("bcdefghijklmnopqrstuvwxyza" * 3)[:length]

    for _ in range(5):
        await asyncio.gather(*(one(rng.randint(1, 60)) for _ in range(8)))


@pytest.mark.parametrize("path", PATHS)
async def test_failure_in_mid_stream_is_one_event(launch, path):
    running = await launch(error_at=2)
    async with running.http.post(path, json=PATHS[path] | {"stream": True}) as response:
        assert response.status == 200
        data = await events(response)
    error = json.loads(data[-1])["error"]
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert sum("error" in item for item in data) == 1
    assert "[DONE]" not in data


async def wait_until(condition, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition belongs to the server, which has no event for it
            await asyncio.sleep(0.005)


def connect(running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.server.bound_port))


def send(sock: socket.socket, body: dict, path: str = "/v1/completions") -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


@pytest.mark.parametrize("half", [False, True], ids=["close", "half-close"])
@pytest.mark.parametrize(
    "body", [{}, {"stream": True}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "stream": True}]
)
@pytest.mark.parametrize("hold", [False, True], ids=["running", "queued"])
async def test_a_client_that_leaves_aborts(launch, body, hold, half):
    """Not streaming, streaming in mid-way, and queued before the first token; several prompts too."""
    running = await launch(step_s=0.01, hold=hold)
    running.engine.config.max_model_len = 100000
    sock = connect(running)
    send(sock, {"prompt": "a", "max_tokens": 50000} | body)
    await wait_until(lambda: running.engine.open)
    if half:
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()
    await wait_until(lambda: not running.engine.open)
    await wait_until(lambda: running.server.state.num_in_flight == 0)
    assert not running.server.state.active_ids
    sock.close()


async def test_one_client_leaving_leaves_the_others(launch):
    running = await launch(step_s=0.005)
    sock = connect(running)
    send(sock, {"prompt": "a", "max_tokens": 60, "stream": True})
    other = asyncio.create_task(running.post("/v1/completions", {"prompt": "k", "max_tokens": 20}))
    await wait_until(lambda: len(running.engine.open) == 2)
    sock.close()
    _, answer = await other
    assert answer["choices"][0]["text"] == "lmnopqrstuvwxyzabcde"


async def test_a_reader_that_does_not_read_is_dropped(launch):
    """After the stall time its request is aborted; others run on at their own speed meanwhile."""
    running = await launch(stall_timeout_s=0.2)
    running.engine.config.max_model_len = 10**7
    stalled = connect(running)
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    send(stalled, {"prompt": "a", "max_tokens": 10**6, "stream": True, "n": 100, "temperature": 1})
    await wait_until(lambda: running.engine.open)
    status, _ = await running.post("/v1/completions", {"prompt": "k", "max_tokens": 5})
    assert status == 200
    await wait_until(lambda: not running.engine.open, timeout_s=5.0)
    stalled.close()
