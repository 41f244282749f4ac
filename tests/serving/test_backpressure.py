"""A client that reads slowly, or not at all, costs a bounded buffer: its request waits and goes on when it reads."""

import asyncio
import json
import socket

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
    async with asyncio.timeout(20):
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
    async with asyncio.timeout(10):
        while running.engine.totals.generation_tokens_total < made + 5000:
            assert await asyncio.get_running_loop().sock_recv(clients[0], 1 << 16)
    for client in clients:
        client.close()
    async with asyncio.timeout(10):
        while running.engine.open:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.01)
