"""Keys (R27) and cross-origin requests."""

import asyncio
import json

import pytest

from octavo.serving.options import CorsPolicy

KEYS = ("first-key", "second-k\u00e9y")
ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("GET", "/v1/models/perm"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nowhere"),
    ("GET", "//v1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/health/../v1/models"),
    ("GET", "/%68ealth/x"),
    ("DELETE", "/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_everything_needs_a_key(launch, method, path):
    running = await launch(api_keys=KEYS)
    for header in (None, "Bearer wrong", "Bearer ", "first-key", "Basic first-key", "Bearer first-key2", "Bearer firs"):
        status, _, body = await raw(running, method, path, header)
        assert status == 401, header
        if method != "HEAD":
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (401, "AuthenticationError")
    for key in KEYS:
        status, _, _ = await raw(running, method, path, f"Bearer {key}")
        assert status != 401


async def test_no_route_is_open_by_accident(launch):
    """Every route that the application has, also those that are added later."""
    running = await launch(api_keys=KEYS)
    routes = [(route.method, route.resource.canonical) for route in running.server.app.router.routes()]
    assert len(routes) > 10
    for method, path in routes:
        status, _, _ = await raw(running, method, path.replace("{id}", "perm"), None)
        assert (status == 401) is (path not in ("/health", "/live", "/ready")), (method, path)


async def raw(running, method: str, path: str, authorization: str | None, more: str = "") -> tuple[int, str, bytes]:
    """(status, head, body) of a request as its bytes are written here: no client tidies the path."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.bound_port)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n{more}"
    if authorization is not None:
        head += f"Authorization: {authorization}\r\n"
    writer.write(f"{head}\r\n".encode())
    answer = await reader.read()
    writer.close()
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), head_bytes.decode(), body


async def test_scheme_is_not_case_sensitive(launch):
    running = await launch(api_keys=KEYS)
    assert (await raw(running, "GET", "/v1/models", "bearer first-key"))[0] == 200


async def test_bytes_that_are_no_text(launch):
    running = await launch(api_keys=KEYS)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.bound_port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_two_headers_are_refused(launch):
    running = await launch(api_keys=KEYS)
    more = "Authorization: Bearer wrong\r\n"
    assert (await raw(running, "GET", "/v1/models", "Bearer first-key", more))[0] == 401


async def test_public_list(launch):
    running = await launch(api_keys=KEYS)
    for path in ("/health", "/live", "/ready", "/health?x=1"):
        assert (await raw(running, "GET", path, None))[0] == 200
    running = await launch(api_keys=KEYS, public_metrics=True)
    assert (await raw(running, "GET", "/metrics", None))[0] == 200
    assert (await raw(running, "GET", "/version", None))[0] == 401


async def test_no_key_configured(running):
    assert (await raw(running, "GET", "/v1/models", None))[0] == 200


PREFLIGHT = (
    "Origin: http://page.example\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: authorization,content-type\r\n"
)


async def test_preflight_needs_no_key(launch):
    running = await launch(api_keys=KEYS, cors=CorsPolicy(origins=("*",)))
    status, head, _ = await raw(running, "OPTIONS", "/v1/chat/completions", None, PREFLIGHT)
    assert 200 <= status < 300
    assert "Access-Control-Allow-Origin: *" in head
    assert "Access-Control-Allow-Methods: POST" in head
    assert "Access-Control-Allow-Headers: authorization,content-type" in head


async def test_errors_and_streams_carry_the_headers_too(launch):
    running = await launch(api_keys=KEYS, cors=CorsPolicy(origins=("*",)))
    status, head, _ = await raw(running, "GET", "/v1/models", None, PREFLIGHT)
    assert status == 401
    assert "Access-Control-Allow-Origin: *" in head
    headers = {"Origin": "http://page.example", "Authorization": "Bearer first-key"}
    async with running.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_only_listed_origins(launch):
    running = await launch(cors=CorsPolicy(origins=("http://page.example",), credentials=True))
    _, head, _ = await raw(running, "GET", "/live", None, "Origin: http://page.example\r\n")
    assert "Access-Control-Allow-Origin: http://page.example" in head
    assert "Access-Control-Allow-Credentials: true" in head
    assert "Vary: Origin" in head
    _, head, _ = await raw(running, "GET", "/live", None, "Origin: http://other.example\r\n")
    assert "Access-Control" not in head
    _, head, _ = await raw(running, "GET", "/live", None)
    assert "Access-Control" not in head
