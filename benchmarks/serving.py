"""Load on a running OpenAI-compatible server, Octavo or any other; figures under the names of ``vllm bench serve``.

    python benchmarks/serving.py --base-url http://127.0.0.1:8000 --dataset-name batch --max-concurrency 8 --ignore-eos
    python benchmarks/serving.py --dataset-name random --random-input-len 256 --num-prompts 200 --request-rate 4

Closed loop: ``--max-concurrency N`` keeps at most N requests in flight. Open loop: ``--request-rate R`` sends requests
at random times, R a second on average, whether or not earlier ones have finished. Both together cap an open loop.
"""

import argparse
import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from client import BACKENDS, READ_BUFFER_BYTES, Call, Timed, send
from latency import percentile_name, summarise_ms
from workloads import NAMES, RandomSpec, WorkItem, random_workload, read_workload

METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (first excluded)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
REQUEST_TIMEOUT_S = 6 * 3600


def arrival_times_s(count: int, request_rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """When to send each request, in seconds from the start, ascending.

    Gaps are gamma distributed with mean ``1 / request_rate`` and shape ``burstiness``: 1 is a Poisson process, less is
    burstier, more is steadier. An infinite rate sends all at once. Raises ValueError naming a bad argument.
    """
    if not request_rate > 0:
        raise ValueError(f"request_rate must be positive, got {request_rate}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness must be positive and finite, got {burstiness}")
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=count)
    return np.cumsum(gaps).tolist()


async def run_load(
    calls: list[Call], arrivals_s: list[float], max_concurrency: int | None
) -> tuple[list[Timed], float]:
    """Sends every call at its time; results in the order of ``calls``, and the seconds from start to last end.

    With ``max_concurrency`` a call waits for a free place, and its times count from when it is sent.
    """
    places: asyncio.Semaphore | contextlib.nullcontext[None]
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES) as session:
        start_s = time.perf_counter()

        async def one(call: Call, at_s: float) -> Timed:
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            async with places:
                return await send(session, call)

        results = await asyncio.gather(*(one(call, at) for call, at in zip(calls, arrivals_s, strict=True)))
        return results, time.perf_counter() - start_s


def peak_concurrency(results: Sequence[Timed]) -> int:
    """Most requests in flight at one time."""
    edges = [(r.start_s, 1) for r in results if r.success] + [
        (r.start_s + r.latency_s, -1) for r in results if r.success
    ]
    level = peak = 0
    for _, step in sorted(edges):
        level += step
        peak = max(peak, level)
    return peak


def compute_metrics(
    results: Sequence[Timed], duration_s: float, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The figures of a run, over the requests that succeeded; throughputs are per second of ``duration_s``."""
    done = [result for result in results if result.success]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration_s,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "max_concurrent_requests": peak_concurrency(results),
    }
    values = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if r.tpot_s is not None],
        "itl": [gap for r in done for gap in r.itl_s],
        "e2el": [r.latency_s for r in done],
    }
    for name in metrics:
        figures |= summarise_ms(name, values[name], percentiles)
    return figures


def goodput(results: Sequence[Timed], duration_s: float, limits_ms: dict[str, float]) -> float:
    """Requests a second that kept every limit (ttft, tpot, e2el, in milliseconds)."""

    def good(result: Timed) -> bool:
        times_s = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.latency_s}
        return result.success and all(times_s[name] * 1e3 <= limit for name, limit in limits_ms.items())

    return sum(good(result) for result in results) / duration_s


def report(figures: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as text."""
    rows = [
        ("Successful requests", f"{figures['completed']}"),
        ("Failed requests", f"{figures['failed']}"),
        ("Duration (s)", f"{figures['duration']:.2f}"),
        ("Input tokens", f"{figures['total_input_tokens']}"),
        ("Output tokens", f"{figures['total_output_tokens']}"),
        ("Requests/s", f"{figures['request_throughput']:.2f}"),
        ("Output tokens/s", f"{figures['output_throughput']:.2f}"),
        ("Total tokens/s", f"{figures['total_token_throughput']:.2f}"),
        ("Most requests in flight", f"{figures['max_concurrent_requests']}"),
    ]
    if "request_goodput" in figures:
        rows.append(("Requests/s within limits", f"{figures['request_goodput']:.2f}"))
    statistics = ["mean", "median", "std", *(percentile_name(p) for p in percentiles)]
    for name in metrics:
        rows.append((f"-- {TITLES[name]}, ms", ""))
        rows += [(s, f"{figures[f'{s}_{name}_ms']:.2f}") for s in statistics if f"{s}_{name}_ms" in figures]
    return "\n".join(f"{label:<42}{value:>14}".rstrip() for label, value in rows)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"unknown metric {name!r}; choose from {', '.join(METRICS)}")
    return names


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a list of numbers: {text!r}") from None
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"percentiles must be in [0, 100], got {text!r}")
    return values


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in ("ttft", "tpot", "e2el") or limit < 0:
        raise argparse.ArgumentTypeError(f"a limit reads ttft:MS, tpot:MS or e2el:MS, got {text!r}")
    return name, limit


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="openai")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--endpoint", help="path; default: the backend's own")
    parser.add_argument("--model", help="default: the first that /v1/models lists")
    parser.add_argument("--api-key")
    data = parser.add_argument_group("dataset")
    data.add_argument("--dataset-name", default="random", help=f"random, {', '.join(NAMES)}, or a JSON-lines file")
    data.add_argument("--num-prompts", type=int, help="default: the whole file; 100 at random")
    data.add_argument("--random-input-len", type=int, default=128)
    data.add_argument("--random-output-len", type=int, default=128)
    data.add_argument("--random-range-ratio", type=float, default=0.0)
    data.add_argument("--random-prefix-len", type=int, default=0)
    data.add_argument("--random-vocab-size", type=int, default=32000)
    data.add_argument("--seed", type=int, default=0, help="of the random dataset and of the arrival times")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="requests a second; default: all at once")
    load.add_argument("--burstiness", type=float, default=1.0)
    load.add_argument("--max-concurrency", type=int)
    load.add_argument("--num-warmups", type=int, default=0, help="requests sent first, one by one, and not counted")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--ignore-eos", action="store_true", help="sends ignore_eos, which vLLM and Octavo know")
    sampling.add_argument("--temperature", type=float, default=0.0)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    output = parser.add_argument_group("figures")
    output.add_argument("--percentile-metrics", type=_names, default=list(METRICS), help="of ttft,tpot,itl,e2el")
    output.add_argument("--metric-percentiles", type=_numbers, default=[50.0, 90.0, 99.0])
    output.add_argument("--goodput", type=_limit, nargs="+", default=[], help="limits in ms, such as ttft:500 tpot:50")
    output.add_argument("--output", type=Path, help="write the figures as JSON here")
    args = parser.parse_args(argv)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        parser.error(f"--max-concurrency must be positive, got {args.max_concurrency}")
    return args


def load_items(args: argparse.Namespace) -> list[WorkItem]:
    """The requests that the arguments ask for."""
    if args.dataset_name != "random":
        return read_workload(args.dataset_name, args.num_prompts)
    spec = RandomSpec(
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        vocab_size=args.random_vocab_size,
    )
    return random_workload(spec, args.num_prompts or 100, args.seed)


def build_calls(args: argparse.Namespace, items: list[WorkItem], model: str) -> list[Call]:
    """One call per request. Raises ValueError when the dataset has no text and the backend needs it."""
    body: dict[str, Any] = {"temperature": args.temperature}
    optional = {"top_p": args.top_p, "top_k": args.top_k, "ignore_eos": args.ignore_eos or None}
    body |= {name: value for name, value in optional.items() if value is not None}
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    url = args.base_url.rstrip("/") + (args.endpoint or BACKENDS[args.backend])
    chat = args.backend == "openai-chat"
    if chat and not all(item.prompt for item in items):
        raise ValueError("openai-chat needs prompts with text; this dataset has token ids only")
    prompts: list[str | list[int]] = [item.prompt if chat else item.prompt_ids for item in items]
    return [
        Call(url, args.backend, model, prompt, item.max_tokens, body, headers)
        for prompt, item in zip(prompts, items, strict=True)
    ]


async def find_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises RuntimeError with what the server said instead."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{base_url.rstrip('/')}/v1/models"
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        text = await response.text()
    if response.status != 200:
        raise RuntimeError(f"/v1/models: HTTP {response.status}: {text[:200]}")
    return json.loads(text)["data"][0]["id"]


async def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what the arguments ask for; the figures with the settings. Raises RuntimeError if every request failed."""
    items = load_items(args)
    model = args.model or await find_model(args.base_url, args.api_key)
    calls = build_calls(args, items, model)
    for call in calls[: args.num_warmups]:
        await run_load([call], [0.0], None)
    rng = np.random.default_rng(args.seed)
    arrivals_s = arrival_times_s(len(calls), args.request_rate, args.burstiness, rng)
    results, duration_s = await run_load(calls, arrivals_s, args.max_concurrency)
    errors = [result.error for result in results if result.error]
    if len(errors) == len(results):
        raise RuntimeError(f"every request failed, the first with: {errors[0]}")
    settings = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": args.backend,
        "model_id": model,
        "dataset_name": args.dataset_name,
        "num_prompts": len(calls),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
    }
    figures = settings | compute_metrics(results, duration_s, args.percentile_metrics, args.metric_percentiles)
    if args.goodput:
        figures["request_goodput"] = goodput(results, duration_s, dict(args.goodput))
    return figures | {"errors": errors}


def main() -> int:
    args = parse_arguments()
    figures = asyncio.run(benchmark(args))
    print(report(figures, args.percentile_metrics, args.metric_percentiles))
    for error in figures["errors"][:3]:
        print(f"failed: {error}", file=sys.stderr)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
