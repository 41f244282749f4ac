"""Debian's Prometheus with the shipped configuration, quicker and on other addresses."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from nginx_process import free_port

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
PROMETHEUS = shutil.which("prometheus")
INTERVAL_MS = 500


def write_config(folder: Path, ports: Sequence[int]) -> Path:
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    targets = ", ".join(f"127.0.0.1:{port}" for port in ports)
    text, num_targets = re.subn(r"targets: \[.*\]", f"targets: [{targets}]", text)
    text, num_intervals = re.subn(r"(scrape|evaluation)_interval: \d+s", rf"\1_interval: {INTERVAL_MS}ms", text)
    assert (num_targets, num_intervals) == (1, 2)
    shutil.copy(FOLDER / "alerts.yml", folder)
    file = folder / "prometheus.yml"
    file.write_text(text)
    return file


@asynccontextmanager
async def prometheus_process(folder: Path, ports: Sequence[int]) -> AsyncIterator[str]:
    """Its address, once it is ready; it scrapes these ports."""
    assert PROMETHEUS is not None
    file = write_config(folder, ports)
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(PROMETHEUS, *options, stderr=log)
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as client:
            while True:
                assert process.returncode is None, (folder / "prometheus.log").read_text()
                with suppress(aiohttp.ClientError):
                    async with client.get(f"http://{address}/-/ready") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield f"http://{address}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)
