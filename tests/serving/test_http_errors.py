"""Errors that are not about one field: every one is JSON in OpenAI's shape, and the server stays alive."""

import asyncio
import gzip
import json

import openai
import pytest

JSON = {"Content-Type": "application/json"}
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


async def check(response, status: int) -> dict:
    """The error of an answer that must have ``status`` and OpenAI's shape."""
    assert response.status == status
    assert response.content_type == "application/json"
    body = json.loads(await response.text())
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[]", b"null", b"5", b'"x"', b"{", b'{"prompt": }', b"{'prompt': 1}", b"\xff\xfe", b"[" * 100000],
    ids=lambda body: repr(body[:12]),
)
async def test_bodies_that_are_no_object(running, path, body):
    async with running.http.post(path, data=body, headers=JSON) as response:
        await check(response, 400)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_content_type(running, path, content_type):
    async with running.http.post(path, data=b"{}", headers={"Content-Type": content_type}) as response:
        error = await check(response, 400)
        assert "application/json" in error["message"]


async def test_content_type_may_name_a_charset(running):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    async with running.http.post("/v1/completions", data=b'{"prompt":"a"}', headers=headers) as response:
        assert response.status == 200


async def test_unknown_route_and_method(running):
    for path in ("/", "/v1", "/v1/files", "/v1/models/", "/V1/models"):
        async with running.http.get(path) as response:
            await check(response, 404)
    async with running.http.get("/v1/completions") as response:
        await check(response, 405)
        assert response.headers["Allow"] == "POST"
    async with running.http.delete("/v1/models") as response:
        await check(response, 405)


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(running, stream):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "u"}]})):
        async with running.http.post(path, json={**body, "model": "other", "stream": stream}) as response:
            error = await check(response, 404)
            assert error["param"] == "model"
            assert error["type"] == "NotFoundError"
            assert "org/perm-alias" in error["message"]
    with pytest.raises(openai.NotFoundError):
        await running.openai().models.retrieve("other")


async def test_too_large(launch):
    """The limit is an option, and a body that only unpacks to too much is stopped too."""
    running = await launch(max_request_body_bytes=2 << 20)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "pad": "x" * (1 << 20)}).encode()
    async with running.http.post("/v1/completions", data=body, headers=JSON) as response:
        assert response.status == 200
    async with running.http.post("/v1/completions", data=body * 3, headers=JSON) as response:
        error = await check(response, 413)
        assert error["type"] == "RequestTooLargeError"
    bomb = gzip.compress(b"x" * (64 << 20))
    async with running.http.post("/v1/completions", data=bomb, headers=JSON | {"Content-Encoding": "gzip"}) as response:
        await check(response, 413)
    assert (await running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue(launch, stream):
    running = await launch(queue_limit=0)
    async with running.http.post("/v1/completions", json={"prompt": "a", "stream": stream}) as response:
        await check(response, 503)
        assert int(response.headers["Retry-After"]) >= 1
    async with running.http.get("/metrics") as response:
        text = await response.text()
    assert 'vllm:admission_rejections_total{engine="0",model_name="perm",reason="queue_full"} 1.0' in text


async def test_a_choice_that_fails(launch):
    running = await launch(error_at=0)
    for stream in (False, True):
        async with running.http.post("/v1/completions", json={"prompt": "a", "stream": stream}) as response:
            error = await check(response, 500)
            assert error["type"] == "InternalServerError"


async def test_an_abort_before_any_output(running):
    async def nothing(*args, **options):
        return
        yield

    running.engine.generate = nothing
    for stream in (False, True):
        async with running.http.post("/v1/completions", json={"prompt": "a", "stream": stream}) as response:
            await check(response, 503)


async def test_unforeseen_errors_tell_nothing(running, caplog):
    async def explode(text, add_special_tokens=True):
        raise ZeroDivisionError("a secret")

    running.engine.encode = explode
    async with running.http.post("/v1/completions", json={"prompt": "a"}) as response:
        error = await check(response, 500)
        assert "secret" not in error["message"]
    assert "a secret" in caplog.text


async def test_request_id_is_a_label(running):
    """R22: short and plain ones come back, others do not; the engine never sees them."""
    for given, kept in [("abc-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("x\u00e9", False)]:
        body = {"prompt": "a", "max_tokens": 1}
        async with running.http.post("/v1/completions", json=body, headers={"X-Request-Id": given}) as response:
            answer = await response.json()
            label = response.headers["X-Request-Id"]
            assert (label == given) is kept
            assert answer["id"] == f"cmpl-{label}"
    async with running.http.get("/nowhere", headers={"X-Request-Id": "abc"}) as response:
        assert response.headers["X-Request-Id"] == "abc"


async def test_the_same_request_id_twice_at_once(launch):
    running = await launch(step_s=0.01)
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(
        *(running.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, headers=headers) for _ in range(3))
    )
    assert [answer["choices"][0]["text"] for _, answer in answers] == ["bcd"] * 3


async def test_the_servers_own_limit(launch):
    """Past the cap 503, all are answered, and choices count one each; what can never fit is 400."""
    running = await launch(hold=True, max_queued=4)
    body = {"prompt": "a", "max_tokens": 1}
    tasks = [asyncio.create_task(running.post("/v1/completions", body)) for _ in range(50)]
    while sum(task.done() for task in tasks) < 42:  # noqa: ASYNC110 - tasks of clients
        await asyncio.sleep(0.005)
    running.engine.release.set()
    statuses = sorted(status for status, _ in await asyncio.gather(*tasks))
    assert statuses == [200] * 8 + [503] * 42
    assert (await running.post("/v1/completions", body | {"n": 8, "temperature": 1}))[0] == 200
    status, answer = await running.post("/v1/completions", body | {"n": 9, "temperature": 1})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert running.server.state.num_choices == 0


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET /health HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_what_is_no_http_is_refused_without_a_traceback(running, caplog, garbage):
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.bound_port)
    writer.write(garbage)
    answer = await asyncio.wait_for(reader.read(100), 10)
    writer.close()
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
