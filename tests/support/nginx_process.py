"""Debian's nginx with the shipped configuration, on a free port and in a folder of its own."""

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
SERVER_LINE = re.compile(r"^ *server octavo-\d+:8000( .*);\n", re.MULTILINE)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Nginx:
    url: str
    folder: Path

    @property
    def access_log(self) -> str:
        return (self.folder / "access.log").read_text()


def localised(port: int, ports: Sequence[int], folder: Path) -> str:
    """The shipped file with other addresses and folders, and the same parameters."""
    text = CONFIG.read_text(encoding="utf-8")
    lines = SERVER_LINE.findall(text)
    assert len(lines) == 3
    assert len(set(lines)) == 1
    text = SERVER_LINE.sub("", text)
    servers = "".join(f"server 127.0.0.1:{one}{lines[0]};\n" for one in ports)
    changes = {
        "/tmp/": f"{folder}/",
        "least_conn;\n": f"least_conn;\n{servers}",
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "/dev/stdout": f"{folder}/access.log",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_config(port: int, ports: Sequence[int], folder: Path, changes: dict[str, str]) -> Path:
    text = localised(port, ports, folder)
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nginx.conf"
    file.write_text(text)
    return file


@asynccontextmanager
async def nginx_process(
    ports: Sequence[int], folder: Path, changes: dict[str, str] | None = None
) -> AsyncIterator[Nginx]:
    """In front of these ports; ``changes`` are replacements in the configuration, for mutations."""
    assert NGINX is not None
    port = free_port()
    file = write_config(port, ports, folder, changes or {})
    command = [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(file), "-g", "daemon off;"]
    with (folder / "error.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    nginx = Nginx(f"http://127.0.0.1:{port}", folder)
    try:
        await _until_live(nginx, process)
        yield nginx
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 10)


async def _until_live(nginx: Nginx, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(30), aiohttp.ClientSession() as client:
        while True:
            assert process.returncode is None, (nginx.folder / "error.log").read_text()
            with suppress(aiohttp.ClientError):
                async with client.get(f"{nginx.url}/live") as response:
                    assert response.status == 200
                    return
            await asyncio.sleep(0.01)
