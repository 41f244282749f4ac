"""What one API process can stream, with a core that emits at will: no model, no device, one SSE frame a token.

    python benchmarks/api_overhead.py --streams 256 --tokens 400 --repeat 5 --output overhead.json

Three processes: the API server over a fake core, a client that only counts frames, and this one. Beside it, in turns
within the same run, the ceiling: bare aiohttp writing the very same frames to the same client. Exit status 1 when
frames were merged or, with ``--at-least``, when the median is below that many tokens a second.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from latency import median_of, number, spread, table
from stream_counter import Tally

HERE = Path(__file__).parent
MARKER = "~"
MODEL_NAME = "fake"
MERGED_SHARE = 0.001
"""More than this is a collector that merges, which would hide what a token costs."""
FIGURES = {
    "tokens_per_s": ("tokens/s", 0),
    "frames_per_s": ("frames/s", 0),
    "cpu_s_per_1000_tokens": ("CPU s / 1,000 tokens", 4),
    "cpu_share": ("CPU share of the server", 2),
    "merged_share": ("merged share", 4),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=["chat", "completions"], default="chat")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", help="whose tokenizer and template are used (default: the embedded model)")
    parser.add_argument("--at-least", type=float, help="fail below this many tokens/s (the median)")
    parser.add_argument("--output", type=Path, help="write all figures as JSON here")
    args = parser.parse_args(argv)
    for name in ("streams", "tokens", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


@contextmanager
def server(*arguments: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of one of ``overhead_servers.py``."""
    command = [sys.executable, str(HERE / "overhead_servers.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{arguments[0]} did not start")
        yield process.pid, int(line)
    finally:
        process.kill()
        process.wait()


def count(args: argparse.Namespace, pid: int, port: int, tally: Path) -> dict[str, Any]:
    """The figures of one run of the client, in a process of its own."""
    asked = {"model": MODEL_NAME, "stream": True, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0}
    if args.api == "chat":
        path, body = "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": "hello"}]}
    else:
        path, body = "/v1/completions", asked | {"prompt": "hello"}
    command = [sys.executable, str(HERE / "stream_counter.py"), "--marker", MARKER, "--path", path]
    command += ["--body", json.dumps(body), "--port", str(port), "--pid", str(pid)]
    command += ["--streams", str(args.streams), "--tokens", str(args.tokens), "--tally", str(tally)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(args: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """One entry per repeat: the figures of ``api`` and of ``ceiling``."""
    with tempfile.TemporaryDirectory() as folder:
        tally, frame = Path(folder, "tally"), Path(folder, "frame")
        Tally.create(tally)
        options = ["--tally", str(tally), "--streams", str(args.streams)]
        model = ["--model", args.model] if args.model else []
        rounds: list[dict[str, dict[str, Any]]] = []
        with server("api", *options, *model) as (pid, port):
            warm = count(args, pid, port, tally)
            frame.write_text(warm["frame"])
            frames = ["--frame", str(frame), "--tokens", str(args.tokens)]
            with server("ceiling", *options, *frames) as (bare_pid, bare_port):
                for place in range(args.repeat):
                    api = count(args, pid, port, tally)
                    ceiling = count(args, bare_pid, bare_port, tally)
                    rounds.append({"api": api, "ceiling": ceiling})
                    print(f"{place + 1}: {api['tokens_per_s']:,.0f} of {ceiling['tokens_per_s']:,.0f} tokens/s")
        return rounds


def report(rounds: list[dict[str, dict[str, Any]]]) -> str:
    lines = []
    for which in ("api", "ceiling"):
        rows = [entry[which] for entry in rounds]
        for key, (title, digits) in FIGURES.items():
            values = [row[key] for row in rows]
            middle = median_of(rows, key)
            figures = [number(value, digits) for value in (middle, min(values), max(values))]
            lines.append([f"{which}: {title}", *figures, f"{spread(values):.0%}" if middle > 0 else "-"])
    ratios = [entry["api"]["tokens_per_s"] / entry["ceiling"]["tokens_per_s"] for entry in rounds]
    ratio = median_of([{"ratio": value} for value in ratios], "ratio")
    lines.append(["api / ceiling", *(number(v, 2) for v in (ratio, min(ratios), max(ratios))), f"{spread(ratios):.0%}"])
    return table(["figure", "median", "min", "max", "spread"], lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    rounds = measure(args)
    print(report(rounds))
    if args.output is not None:
        options = {name: value for name, value in vars(args).items() if name != "output"}
        about = {"date": datetime.now().astimezone().isoformat(timespec="seconds"), "cpus": os.cpu_count()}
        about |= {"python": platform.python_version(), "machine": platform.machine()}
        args.output.write_text(json.dumps({"options": options, **about, "rounds": rounds}, indent=1) + "\n")
    api = [entry["api"] for entry in rounds]
    merged = max(row["merged_share"] for row in api)
    if merged > MERGED_SHARE:
        print(f"frames were merged: {merged:.2%} of the tokens came without a frame of their own", file=sys.stderr)
        return 1
    if args.at_least is not None and median_of(api, "tokens_per_s") < args.at_least:
        print(f"below {args.at_least:,.0f} tokens/s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
