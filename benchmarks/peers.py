"""Octavo and other engines side by side: same weights, same prompt ids, one machine, one run.

    python benchmarks/peers.py --envs ENVS --setup vllm
    python benchmarks/export_default_model.py --output MODEL --gguf-f16 MODEL_F16.gguf
    python benchmarks/peers.py --envs ENVS --model MODEL --gguf MODEL_F16.gguf --peers octavo vllm --repeat 5

Every engine runs in a process and an environment of its own (``ENVS/<peer>``; Octavo in the one that runs this).
All are loaded first, then take turns: octavo, peer, octavo, peer, so that a machine that gets slower or faster does so
for all. One table of medians, spreads and ratios to Octavo; all runs as JSON under ``benchmarks/results/``.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from latency import number, percentile, spread, table
from peer_setup import environment_python, set_up
from workloads import NAMES, WARM_UP_ROUND

HERE = Path(__file__).resolve().parent
PEERS = {"octavo": "model", "vllm": "model", "transformers": "model", "openvino": "gguf", "llama_cpp": "gguf"}
"""Peer -> which of --model and --gguf it loads."""
AGREEMENT_TOKENS = 8
"""Greedy outputs of engines that compute the same model agree on their first tokens; later a near-tie may part them."""
LOAD_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 30.0


class Adapter:
    """One engine's process. Its standard error goes to a log file, named in every error."""

    def __init__(self, name: str, python: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"peer-{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python), str(HERE / "peer_adapters" / f"peer_{name}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def wait_ready(self) -> dict[str, str]:
        """What the engine says about itself once it is loaded. Raises RuntimeError if it died or took too long."""
        line = self._read_line(LOAD_TIMEOUT_S)
        if not line.startswith("READY "):
            raise RuntimeError(f"{self.name} said {line[:200]!r} instead of READY; its log: {self.log.name}")
        return json.loads(line.removeprefix("READY "))

    def run(self, workload: str, round_index: int, timeout_s: float) -> dict[str, Any]:
        """One run's answer. Raises RuntimeError if the process died, took too long, or reported an error."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"run {workload} {round_index}\n")
            self.process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"{self.name} is gone ({error}); its log: {self.log.name}") from error
        answer = json.loads(self._read_line(timeout_s))
        if "error" in answer:
            raise RuntimeError(f"{self.name} on {workload}: {answer['error']}; its log: {self.log.name}")
        return answer

    def stop(self) -> None:
        """Ends the process: by end of file, else by signals."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(STOP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def _read_line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        killer = threading.Timer(timeout_s, self.process.kill)
        killer.start()
        line = self.process.stdout.readline()
        killer.cancel()
        if not line:
            raise RuntimeError(f"{self.name} died or passed {timeout_s:.0f} s; its log: {self.log.name}")
        return line


@dataclass(slots=True)
class Results:
    """Answers by (workload, peer), in rounds; failures by the same key."""

    runs: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)

    def throughputs(self, workload: str, peer: str) -> list[float]:
        """Output tokens per second of every round."""
        return [run["output_tokens"] / run["wall_s"] for run in self.runs.get((workload, peer), [])]

    def agreement(self, workload: str, peer: str, reference: str) -> float | None:
        """Share of the first round's requests whose first tokens equal the reference's; None without either."""
        pair = [self.runs.get((workload, name)) for name in (peer, reference)]
        if not pair[0] or not pair[1]:
            return None
        mine, theirs = pair[0][0]["output_ids"], pair[1][0]["output_ids"]
        same = [a[:AGREEMENT_TOKENS] == b[:AGREEMENT_TOKENS] for a, b in zip(mine, theirs, strict=True)]
        return sum(same) / len(same)


def take_turns(
    adapters: Sequence[Any], workloads: Sequence[str], repeat: int, timeout_s: float, pause_s: float
) -> Results:
    """A warm-up round, then ``repeat`` rounds in which every engine runs each workload in turn.

    An engine that fails a workload is not asked for it again; the others go on.
    """
    results = Results()
    for round_index in [WARM_UP_ROUND, *range(repeat)]:
        for workload in workloads:
            for adapter in adapters:
                key = (workload, adapter.name)
                if key in results.failures:
                    continue
                time.sleep(pause_s)
                try:
                    answer = adapter.run(workload, round_index, timeout_s)
                except RuntimeError as error:
                    results.failures[key] = str(error)
                    print(f"failed: {error}", file=sys.stderr)
                    continue
                if round_index != WARM_UP_ROUND:
                    results.runs.setdefault(key, []).append(answer)
                    rate = answer["output_tokens"] / answer["wall_s"]
                    print(f"round {round_index}  {workload:<14} {adapter.name:<13} {rate:8.1f} tok/s", flush=True)
    return results


def report(results: Results, peers: Sequence[str], workloads: Sequence[str]) -> str:
    """The table. The ratio is Octavo's (the first peer's) median over the peer's, of runs made side by side."""
    rows = []
    for workload in workloads:
        ours = results.throughputs(workload, peers[0])
        for peer in peers:
            rates = results.throughputs(workload, peer)
            if not rates:
                rows.append([workload, peer, *["failed" if (workload, peer) in results.failures else "-"] * 6])
                continue
            runs = results.runs[workload, peer]
            ttft = [[run[key] for run in runs if run[key] is not None] for key in ("ttft_p50_s", "ttft_p99_s")]
            agreement = results.agreement(workload, peer, peers[0])
            rows.append(
                [
                    workload,
                    peer,
                    number(percentile(rates, 50)),
                    f"{spread(rates):.0%}",
                    number(percentile(ours, 50) / percentile(rates, 50), 2) if ours else "-",
                    *(number(percentile(values, 50) * 1e3, 0) if values else "-" for values in ttft),
                    "-" if agreement is None else f"{agreement:.0%}",
                ]
            )
    headers = ["workload", "engine", "out tok/s", "spread", f"{peers[0]} / it", "TTFT p50 ms", "p99 ms", "same start"]
    return table(headers, rows)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True, help="folder with one virtual environment per peer")
    parser.add_argument(
        "--setup", choices=[peer for peer in PEERS if peer != "octavo"], help="install this peer, then end"
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder, float32")
    parser.add_argument("--gguf", type=Path, help="the same model as GGUF, float16")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), default=["octavo", "vllm"], help="first: the reference"
    )
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one run of one workload")
    parser.add_argument(
        "--pause-s", type=float, default=1.0, help="before each run, for the last engine's threads to rest"
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/peers-DATE.json")
    args = parser.parse_args(argv)
    if args.setup is None:
        for option in sorted({PEERS[peer] for peer in args.peers}):
            if getattr(args, option) is None:
                parser.error(f"--{option} is needed by: {', '.join(p for p in args.peers if PEERS[p] == option)}")
    if args.repeat < 1:
        parser.error(f"--repeat must be positive, got {args.repeat}")
    return args


def start_adapter(args: argparse.Namespace, peer: str) -> Adapter:
    """Starts a peer's process. Raises FileNotFoundError when its environment is missing."""
    python = Path(sys.executable) if peer == "octavo" else environment_python(args.envs, peer)
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist; run: peers.py --envs {args.envs} --setup {peer}")
    model = getattr(args, PEERS[peer]).resolve()
    return Adapter(peer, python, ["--model", str(model), "--max-model-len", str(args.max_model_len)])


def main() -> None:
    args = parse_arguments()
    if args.setup:
        set_up(args.envs, args.setup)
        return
    adapters: list[Adapter] = []
    try:
        about = {}
        for peer in args.peers:
            adapters.append(start_adapter(args, peer))
            about[peer] = adapters[-1].wait_ready()
        results = take_turns(adapters, args.workloads, args.repeat, args.timeout_s, args.pause_s)
    finally:
        for adapter in adapters:
            adapter.stop()
    text = report(results, args.peers, args.workloads)
    print(text)
    date = datetime.now().astimezone()
    document = {
        "date": date.isoformat(timespec="seconds"),
        "machine": machine(),
        "engines": about,
        "runs": [
            {"workload": workload, "peer": peer, **{k: v for k, v in run.items() if k != "output_ids"}}
            for (workload, peer), runs in results.runs.items()
            for run in runs
        ],
        "failures": {f"{workload}/{peer}": message for (workload, peer), message in results.failures.items()},
        "table": text.splitlines(),
    }
    output = args.output or HERE / "results" / f"peers-{date:%Y%m%d-%H%M%S}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written: {output}")


def machine() -> dict[str, str]:
    """Processor, its count as this process may use it, and the system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = f"{len(lines)} x {lines[0].partition(':')[2].strip()}" if lines else model
    return {"processor": model, "system": platform.platform(), "python": platform.python_version()}


if __name__ == "__main__":
    main()
