"""A client that reads slowly, or not at all, costs a bounded buffer: its request waits and goes on when it reads."""

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import ClientConnectionResetError, web

MESSAGES = [{"role": "user", "content": "a"}]
BUFFER_LIMIT = 160 << 10
"""aiohttp waits from 64 KiB on; the last piece, of all choices together, comes on top."""


def write_buffers(running) -> list[int]:
    """Bytes that wait in each connection of the server, beyond the kernel's own buffer."""
    connections = running.server._runner.server.connections
    return [one.transport.get_write_buffer_size() for one in connections if one.transport is not None]


def open_stream(running, **body) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", running.server.bound_port))
    data = json.dumps({"prompt": "a", "stream": True, "temperature": 1, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n".encode() + data)
    return client


async def tokens_at_rest(running) -> int:
    """The number of tokens made, once it no longer grows."""
    made, before = running.engine.totals.generation_tokens_total, -1
    async with asyncio.timeout(60):
        while made != before or not made:
            await asyncio.sleep(0.3)
            before, made = made, running.engine.totals.generation_tokens_total
    return made


async def test_twenty_readers_that_do_not_read(launch):
    running = await launch(stall_timeout_s=60.0)
    running.engine.config.max_model_len, running.engine.config.max_num_seqs = 10**7, 10**5
    clients = [open_stream(running, max_tokens=10**6, n=50) for _ in range(20)]
    made = await tokens_at_rest(running)
    assert made < 20 * 50 * 10**6 / 100
    buffers = write_buffers(running)
    assert len(buffers) == 20
    assert 0 < max(buffers) < BUFFER_LIMIT
    status, _ = await running.post("/v1/completions", {"prompt": "k", "max_tokens": 5})
    assert status == 200
    # One of them reads again.
    clients[0].setblocking(False)
    async with asyncio.timeout(30):
        while running.engine.totals.generation_tokens_total < made + 5000:
            assert await asyncio.get_running_loop().sock_recv(clients[0], 1 << 16)
    for client in clients:
        client.close()
    async with asyncio.timeout(30):
        while running.engine.open:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.01)


async def test_a_connection_that_breaks_is_no_error_of_the_server(running, caplog, monkeypatch):
    """A write notices it before the handler is cancelled: 499 in the metrics and a line of the log, nothing else."""
    write = web.StreamResponse.write
    written = []

    async def write_to_nobody(self, data):
        written.append(data)
        if len(written) % 5 == 0:
            raise ClientConnectionResetError("Cannot write to closing transport")
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write_to_nobody)

    async def read_and_break(path: str, body: dict) -> None:
        async with running.http.post(path, json={**body, "stream": True, "max_tokens": 30}) as response:
            running.server._runner.server.connections[0].transport.abort()
            await response.read()

    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        with pytest.raises(aiohttp.ClientError), caplog.at_level("INFO"):
            await read_and_break(path, body)
    assert caplog.text.count("stream dropped") == 2
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    async with running.http.get("/metrics") as response:
        text = await response.text()
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="499"} 1.0' in text
    assert not running.engine.open
