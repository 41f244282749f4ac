"""``octavo serve`` as a user runs it: a process with children, a port and a log."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

FAKE = [sys.executable, str(Path(__file__).with_name("fake_core_serve.py"))]
REAL = [sys.executable, "-m", "octavo"]


@dataclass
class ServerProcess:
    process: asyncio.subprocess.Process
    log_file: Path
    scratch: Path
    """TMPDIR of the server: what is left in it was left behind."""
    port: int = 0
    children: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def core(self) -> psutil.Process:
        [core] = [one for one in self.children if "core" in " ".join(one.cmdline()[1:])]
        return core

    @property
    def apis(self) -> list[psutil.Process]:
        return [one for one in self.children if "octavo.serving.api_process" in one.cmdline()]

    def see_children(self) -> None:
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    async def until_listening(self) -> None:
        async with asyncio.timeout(60):
            while (found := re.search(r"listening on port (\d+)", self.log)) is None:
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.01)
        self.port = int(found[1])

    async def status(self, path: str) -> int:
        """Over a connection of its own; 0 when nobody answers."""
        with suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as client, client.get(self.url + path) as response:
                return response.status
        return 0

    async def until_ready(self) -> None:
        """All API processes are ready: as many answers in a row as make it unlikely that one was not asked."""
        in_a_row = 0
        async with asyncio.timeout(200):
            while in_a_row < 12:
                in_a_row = in_a_row + 1 if await self.status("/health") == 200 else 0
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.005 if in_a_row else 0.05)
        self.see_children()

    async def exit_code(self, timeout_s: float = 40.0) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def nothing_is_left(self) -> None:
        async with asyncio.timeout(30):
            while any(_is_alive(child) for child in self.children):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)
            while list(self.scratch.iterdir()):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)


@asynccontextmanager
async def server_process(
    command: list[str], folder: Path, *options: str, python_path: str | None = None
) -> AsyncIterator[ServerProcess]:
    """Started on a free port, listening but not yet ready; killed at the end if it is still there."""
    home = Path(tempfile.mkdtemp(prefix="ot-", dir="/tmp"))  # short: the path of a socket in it is limited
    scratch = home / "t"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "JAX_PLATFORMS": "cpu"}
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    arguments = ["serve", str(folder), "--host", "127.0.0.1", "--port", "0", "--served-model-name", "tiny", *options]
    with (home / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, *arguments, stderr=log, env=environment)
    server = ServerProcess(process, home / "log", scratch)
    try:
        if "--uds" not in options:
            await server.until_listening()
        yield server
    finally:
        with suppress(psutil.Error):
            server.children += psutil.Process(process.pid).children(recursive=True)
        if process.returncode is None:
            process.kill()
            await process.wait()
        for child in server.children:
            with suppress(psutil.Error):
                child.send_signal(signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def events(body: str) -> list[dict]:
    """The JSON events of a stream; a final ``[DONE]`` is left out."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
