"""A thousand connections at once: each gets an answer, and the limit on open files is no obstacle."""

import asyncio
import json
import logging
import resource
from collections import Counter
from pathlib import Path

import pytest
from scheduled_core import SCHEDULED
from server_process import server_process
from tiny_model import add_tokenizer, tiny_model

from octavo.serving.file_limit import raise_file_limit

CONNECTIONS = 1000
QUEUED = 300
OPTIONS = ("--max-num-seqs", "64", "--max-num-queued-reqs", str(QUEUED), "--disable-access-log", "--disable-log-stats")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("many") / "model"))


@pytest.fixture
def soft_limit():
    """Sets this process's limit on open files; the old one comes back at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def answer(port: int, index: int, everybody: asyncio.Barrier) -> int:
    """The status of one request, sent when all connections are open; streams have to be whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream = index % 2 == 0
    body = json.dumps({"prompt": [5 + index % 200, 7], "max_tokens": 8, "stream": stream, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    await everybody.wait()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    status = int(head.split()[1])
    if status == 200:
        assert ("data: [DONE]" in text) is stream
        assert text.count('"finish_reason":"length"') == 1
    else:
        assert "Retry-After: " in head
        assert '"code":503' in text
    return status


async def test_a_thousand_at_once(folder, soft_limit):
    """The server starts under a limit of 256 files, which it raises itself. Rows and queue take 364, others get 503."""
    soft_limit(256)
    async with server_process(SCHEDULED, folder, *OPTIONS) as server:
        soft_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        await server.until_ready()
        everybody = asyncio.Barrier(CONNECTIONS)
        async with asyncio.timeout(60):
            statuses = await asyncio.gather(*(answer(server.port, index, everybody) for index in range(CONNECTIONS)))
        counts = Counter(statuses)
        assert counts[200] + counts[503] == CONNECTIONS
        assert counts[200] >= 64 + QUEUED
        assert await answer(server.port, 0, asyncio.Barrier(1)) == 200
        assert "Traceback" not in server.log
        server.process.terminate()
        assert await server.exit_code() == 0
        await server.nothing_is_left()


def test_the_limit_is_raised(soft_limit, caplog):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft_limit(200)
    assert raise_file_limit(300) == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    assert raise_file_limit(250) == 300, "never lowered"
    assert not caplog.records


def test_a_limit_that_stays_low_is_logged(soft_limit, caplog, monkeypatch):
    def refuse(kind, limits):
        raise ValueError("not allowed to raise maximum limit")

    soft_limit(200)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(resource, "setrlimit", refuse)
        assert raise_file_limit(300) == 200
    assert "from 200 to 300: not allowed" in caplog.text
    assert "clients beyond about 100 wait" in caplog.text
