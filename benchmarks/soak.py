"""Random traffic on a real server whose cache is far too small; then everything must be as it was before.

    python benchmarks/soak.py --seconds 300
    python benchmarks/soak.py --seconds 60 --serve-options "--api-server-count 2 --no-async-scheduling"

Clients send prompts of all lengths with priorities and several choices, share prefixes, read slowly, leave in the
middle. Afterwards no request may hold anything (the gauges say so without a further request), the memory of each
process must be flat, each answer must be the one that the request gets alone, and the server must stop cleanly with
nothing left behind. The exit status is 1, with a list, when something is wrong. The model is a tiny random one, made
on the spot, unless ``--model`` names another (float32, or texts may differ at near-ties).
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from soak_traffic import Tally, Traffic, known_answers, make_bodies, scrape

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("num_preemptions_total", "prefix_cache_hits_total", "external_prefix_cache_hits_total"),
    *("compiles_after_ready_total", "request_success_total"),
)
PROGRAM = (sys.executable, "-m", "octavo")
VOCAB_SIZE = 300
IDLE_S = 5.0
SAMPLE_S = 0.25
START_S = 300.0
OPTIONS = (
    *("--block-size", "4", "--max-model-len", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
    *("--num-gpu-blocks-override", "20", "--scheduling-policy", "priority", "--swap-space", "0.002"),
    *("--max-num-queued-reqs", "16", "--dtype", "float32", "--disable-log-stats", "--disable-access-log"),
)
"""19 blocks of 4 tokens for 8 requests of up to 64; host memory for some hundred blocks."""


@dataclass
class Report:
    """What a soak saw. ``problems`` judges it."""

    tally: Tally = field(default_factory=Tally)
    gauges: dict[str, float] = field(default_factory=dict)
    """As soon as the last client had gone, or ``IDLE_S`` later where they did not fall to 0."""
    counters: dict[str, float] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Resident bytes of each process, sampled at regular times."""
    log: list[str] = field(default_factory=list)
    """Lines that tell of an error."""
    exit_code: int | None = None
    left_behind: list[str] = field(default_factory=list)
    """Processes and files that outlived the server."""


def growth(values: list[int]) -> int:
    """Bytes between the medians of the second and of the last quarter: the first is for warming up."""
    quarter = len(values) // 4
    if not quarter:
        return 0

    def median(part: list[int]) -> int:
        return sorted(part)[len(part) // 2]

    return median(values[-quarter:]) - median(values[quarter : 2 * quarter])


def problems(report: Report, max_growth: int) -> list[str]:
    """One line for everything that is not as it should be."""
    tally = report.tally
    found = [*(f"wrong answer: {line}" for line in tally.wrong), *(f"failure: {line}" for line in tally.errors)]
    found += [f"{name} is {value:g}, not 0" for name, value in report.gauges.items() if value]
    found += [f"no figure {name}" for name in GAUGES if name not in report.gauges]
    if not tally.counts["finished"]:
        found.append("no request finished")
    if not report.counters.get("num_preemptions_total"):
        found.append("no request was preempted: this was no pressure")
    if compiles := report.counters.get("compiles_after_ready_total"):
        found.append(f"{compiles:g} programs were compiled while serving")
    for name, values in report.memory.items():
        if growth(values) > max_growth:
            found.append(f"memory of {name} grew by {growth(values) / MIB:.1f} MiB")
    found += [f"log: {line}" for line in report.log]
    if report.exit_code:
        found.append(f"the server ended with status {report.exit_code}")
    return found + [f"left behind: {name}" for name in report.left_behind]


async def run_soak(
    url: str, pids: dict[str, int], *, seconds: float, clients: int = 24, num_bodies: int = 40, seed: int = 0
) -> Report:
    """The traffic, on a server that runs already; ``pids`` are the processes whose memory is watched."""
    report = Report()
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        bodies = make_bodies(num_bodies, VOCAB_SIZE, await context_length(session), seed)
        traffic = Traffic(session, bodies, await known_answers(session, bodies), seed)
        watching = asyncio.create_task(watch_memory(pids, report.memory))
        await traffic.run(seconds, clients)
        watching.cancel()
        report.tally = traffic.tally
        end_s = time.monotonic() + IDLE_S
        figures: Counter[str] = await scrape(session)
        while any(figures[name] for name in GAUGES) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
            figures = await scrape(session)
    report.gauges = {name: figures[name] for name in GAUGES if name in figures}
    report.counters = {name: figures[name] for name in COUNTERS if name in figures}
    return report


async def context_length(session: aiohttp.ClientSession) -> int:
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["max_model_len"]


async def watch_memory(pids: dict[str, int], memory: dict[str, list[int]]) -> None:
    while True:
        for name, pid in pids.items():
            memory.setdefault(name, []).append(resident_bytes(pid))
        await asyncio.sleep(SAMPLE_S)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> dict[str, int]:
    """Name -> id of a process's children and theirs."""
    found: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            module = next((word for word in words if word.startswith(b"octavo.")), words[0]).decode()
            found[f"{module} ({child})"] = child
            found |= descendants(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class OwnServer:
    """``octavo serve`` with a folder of its own for its temporary files."""

    def __init__(self, program: Sequence[str], model: Path, options: Sequence[str], folder: Path) -> None:
        self._scratch, self._log = folder / "t", folder / "log"
        self._scratch.mkdir()
        command = [*program, "serve", str(model), "--host", "127.0.0.1", "--port", "0", *options]
        environment = {**os.environ, "TMPDIR": str(self._scratch)}
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(command, stderr=file, env=environment, cwd=folder)
        self.url = ""

    def wait_ready(self) -> None:
        """Raises RuntimeError with the log when the server ends before, or takes ``START_S``."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            time.sleep(0.1)
            if found := re.search(r"listening on port (\d+)", self._log.read_text()):
                self.url = f"http://127.0.0.1:{found[1]}"
                with suppress(OSError), urllib.request.urlopen(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        self.children = descendants(self._process.pid)
                        return
        raise RuntimeError(f"the server did not get ready:\n{self._log.read_text()}")

    @property
    def pids(self) -> dict[str, int]:
        return {"octavo serve": self._process.pid, **self.children}

    def stop(self, report: Report) -> None:
        """A graceful stop; what the end, the log and the folder tell goes into ``report``."""
        self._process.send_signal(signal.SIGTERM)
        report.exit_code = self._process.wait(60)
        time.sleep(0.5)
        report.left_behind = [name for name, pid in self.children.items() if alive(pid)]
        report.left_behind += [path.name for path in self._scratch.iterdir()]
        log = self._log.read_text().splitlines()
        report.log = [line for line in log if re.search(r"Traceback|ERROR|Error", line)]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def make_model(folder: Path) -> Path:
    """The tiny model of the tests: two layers, 300 tokens."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_model import add_tokenizer, tiny_model

    return add_tokenizer(tiny_model(folder))


def soak(
    model: Path, *, seconds: float, clients: int, seed: int, options: Sequence[str], program: Sequence[str] = PROGRAM
) -> Report:
    """Starts the server, runs the traffic, stops the server."""
    # In /tmp: the path of a socket is limited.
    with tempfile.TemporaryDirectory(prefix="octavo-soak-", dir="/tmp") as folder:
        server = OwnServer(program, model, [*OPTIONS, *options], Path(folder))
        try:
            server.wait_ready()
            report = asyncio.run(run_soak(server.url, server.pids, seconds=seconds, clients=clients, seed=seed))
            server.stop(report)
        finally:
            server.kill()
    return report


def summary(report: Report) -> str:
    lines = [f"requests: {', '.join(f'{count} {what}' for what, count in sorted(report.tally.counts.items()))}"]
    lines += [f"{name}: {value:g}" for name, value in (report.gauges | report.counters).items()]
    for name, values in report.memory.items():
        lines.append(f"memory of {name}: {values[-1] / MIB:.1f} MiB, growth {growth(values) / MIB:+.1f} MiB")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic")
    parser.add_argument("--clients", type=int, default=24, help="at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="with a vocabulary of 300 and a tokenizer")
    parser.add_argument("--serve-options", default="", help="more options for octavo serve, in one string")
    parser.add_argument("--max-growth-mib", type=float, default=16.0, help="of a process's memory")
    parser.add_argument("--output", type=Path, help="write the report as JSON here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(Path(folder, "model"))
        options = shlex.split(args.serve_options)
        report = soak(model, seconds=args.seconds, clients=args.clients, seed=args.seed, options=options)
    print(summary(report))
    found = problems(report, int(args.max_growth_mib * MIB))
    for line in found:
        print(f"PROBLEM: {line}", file=sys.stderr)
    if args.output is not None:
        args.output.write_text(json.dumps({"problems": found, **asdict(report)}, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
