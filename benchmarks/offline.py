"""Offline throughput of Octavo: a whole workload handed to ``LLM.generate`` at once.

    python benchmarks/offline.py --workload batch --repeat 3
    python benchmarks/offline.py --random-input-len 512 --random-output-len 64 --num-prompts 16

Prints output tokens per second, total tokens per second, wall time and time to first token (p50, p99), each the
median over the repeats with their spread. The first run, not counted, warms the engine up. Every repeat has another
first token in its prompts, so the prefix cache never holds an earlier repeat.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latency import median_of, number, percentile, spread, table
from workloads import NAMES, WARM_UP_ROUND, RandomSpec, WorkItem, random_workload, read_workload, salt

from octavo import LLM, SamplingParams

FIGURES = {
    "output_throughput": "output tok/s",
    "total_token_throughput": "total tok/s",
    "wall_s": "wall s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
}
ENGINE_OPTIONS = (
    "model",
    "dtype",
    "load_format",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "attention_backend",
    "tensor_parallel_size",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load = parser.add_argument_group("load")
    load.add_argument("--workload", help=f"{', '.join(NAMES)}, or a JSON-lines file")
    load.add_argument("--num-prompts", type=int, help="default: the whole file; 16 at random")
    load.add_argument("--random-input-len", type=int, help="random prompts of this many tokens instead of --workload")
    load.add_argument("--random-output-len", type=int, default=128)
    load.add_argument("--random-range-ratio", type=float, default=0.0)
    load.add_argument("--random-prefix-len", type=int, default=0)
    load.add_argument("--random-vocab-size", type=int, default=32000)
    load.add_argument("--seed", type=int, default=0)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    engine = parser.add_argument_group("engine (as for LLM)")
    engine.add_argument("--model")
    engine.add_argument("--dtype")
    engine.add_argument("--load-format")
    engine.add_argument("--quantization")
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--kv-cache-memory-bytes", type=int)
    engine.add_argument("--attention-backend")
    engine.add_argument("--tensor-parallel-size", type=int)
    engine.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write all figures as JSON here")
    args = parser.parse_args(argv)
    if (args.workload is None) == (args.random_input_len is None):
        parser.error("give either --workload or --random-input-len")
    if args.repeat < 1:
        parser.error(f"--repeat must be positive, got {args.repeat}")
    return args


def load_items(args: argparse.Namespace) -> list[WorkItem]:
    """The requests that the arguments ask for."""
    if args.workload is not None:
        return read_workload(args.workload, args.num_prompts)
    spec = RandomSpec(
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        vocab_size=args.random_vocab_size,
    )
    return random_workload(spec, args.num_prompts or 16, args.seed)


def build_llm(args: argparse.Namespace) -> Any:
    """The engine, with the options that were given."""
    options = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    if args.no_enable_prefix_caching:
        options["enable_prefix_caching"] = False
    return LLM(**options)


def run_once(llm: Any, items: list[WorkItem], sampling: dict[str, Any]) -> dict[str, float]:
    """Figures of one run; times to first token count from the start of the call."""
    params = [SamplingParams(max_tokens=item.max_tokens, ignore_eos=True, **sampling) for item in items]
    prompts = [{"prompt_token_ids": item.prompt_ids} for item in items]
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.monotonic() - start
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    expected = sum(item.max_tokens for item in items)
    if output_tokens != expected:
        raise RuntimeError(f"the engine made {output_tokens} tokens where {expected} were asked for")
    input_tokens = sum(len(item.prompt_ids) for item in items)
    ttft_ms = [(output.metrics.first_token_time_s - start) * 1e3 for output in outputs]
    return {
        "wall_s": wall_s,
        "output_tokens": output_tokens,
        "input_tokens": input_tokens,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "output_throughput": output_tokens / wall_s,
        "total_token_throughput": (output_tokens + input_tokens) / wall_s,
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p99_ms": percentile(ttft_ms, 99),
    }


def report(rows: list[dict[str, float]]) -> str:
    """The table: median, smallest, largest and spread of every figure over the repeats."""
    lines = []
    for key, title in FIGURES.items():
        values = [row[key] for row in rows]
        figures = (median_of(rows, key), min(values), max(values))
        lines.append([title, *(number(f, 3 if key == "wall_s" else 1) for f in figures), f"{spread(values):.0%}"])
    return table(["figure", "median", "min", "max", "spread"], lines)


def main() -> None:
    args = parse_arguments()
    items = load_items(args)
    load_start = time.monotonic()
    llm = build_llm(args)
    load_s = time.monotonic() - load_start
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    run_once(llm, salt(items, WARM_UP_ROUND), sampling)
    rows = [run_once(llm, salt(items, index), sampling) for index in range(args.repeat)]
    print(f"{len(items)} requests, {rows[0]['input_tokens']:.0f} tokens in, {rows[0]['output_tokens']:.0f} out")
    print(f"engine ready after {load_s:.1f} s; {rows[-1]['cached_tokens']:.0f} prompt tokens came from the cache")
    print(report(rows))
    if args.output:
        document = {
            "arguments": {key: str(value) for key, value in vars(args).items() if value is not None},
            "machine": f"{platform.machine()} {platform.processor()}".strip(),
            "load_s": load_s,
            "runs": rows,
            "median": {key: median_of(rows, key) for key in rows[0]},
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
