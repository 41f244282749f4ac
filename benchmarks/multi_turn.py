"""Conversations that take turns on a KV cache too small for all of them, with and without the host tier.

    python benchmarks/multi_turn.py --output multi_turn.json
    python benchmarks/multi_turn.py --conversations 20 --turns 8 --device-share 0.25 --modes off on roomy

Every turn sends the whole conversation so far and a new message. ``--concurrency`` conversations run at a time, one
turn each; then the next ones have their turn. By the time a conversation comes back, the others have reused its blocks
on the device, which holds ``--device-share`` of what all of them take at their end. ``off``: they are computed again.
``on``: they come back from host memory. ``roomy``: the device holds everything, the best there could be.

Reports prompt tokens computed, which do not depend on the machine, and time to first token, which does. The answers
of all modes have to be the same. Each mode runs on an engine of its own; a first turn of other conversations, not
counted, warms it up.
"""

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from latency import number, percentile, table
from workloads import read_workload

from octavo import LLM, SamplingParams

MODES = ("off", "on", "roomy")
BLOCK_SIZE = 16
Conversation = list[int]
"""Token ids, messages and answers in turn."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4, help="conversations that run at a time")
    parser.add_argument("--message-len", type=int, default=48, help="tokens of a message")
    parser.add_argument("--answer-len", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--device-share", type=float, default=0.25, help="of the working set, in modes off and on")
    parser.add_argument("--swap-space", type=float, default=2.0, help="GiB of host memory, in mode on")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "on"])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--load-format")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, help="write all figures as JSON here")
    args = parser.parse_args(argv)
    if min(args.conversations, args.turns, args.concurrency, args.message_len, args.answer_len) < 1:
        parser.error("all counts and lengths must be at least 1")
    if device_blocks(args) < args.concurrency * blocks_of(args):
        parser.error(
            f"{args.concurrency} conversations at a time take {args.concurrency * blocks_of(args)} blocks, the device "
            f"would have {device_blocks(args)}; raise --device-share or lower --concurrency"
        )
    return args


def blocks_of(args: argparse.Namespace) -> int:
    """Blocks of one conversation at its end."""
    return -(-args.turns * (args.message_len + args.answer_len) // BLOCK_SIZE)


def device_blocks(args: argparse.Namespace) -> int:
    return int(args.conversations * blocks_of(args) * args.device_share)


def make_messages(conversations: int, turns: int, length: int) -> list[list[list[int]]]:
    """By conversation and turn, ids from the shipped texts. No two begin alike, so that nothing is shared."""
    ids = [token_id for item in read_workload("batch") for token_id in item.prompt_ids]
    messages = []
    for conversation in range(conversations):
        starts = [(conversation * turns + turn) * length for turn in range(turns)]
        texts = [[ids[(start + i) % len(ids)] for i in range(length)] for start in starts]
        texts[0][0] = 1000 + conversation
        messages.append(texts)
    return messages


def build_llm(args: argparse.Namespace, mode: str) -> Any:
    num_blocks = device_blocks(args) if mode != "roomy" else args.conversations * blocks_of(args) + args.concurrency
    options: dict[str, Any] = {"model": args.model} if args.model else {}
    if args.load_format:
        options["load_format"] = args.load_format
    return LLM(
        **options,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=blocks_of(args) * BLOCK_SIZE,
        max_num_seqs=args.concurrency,
        max_num_batched_tokens=max(args.max_num_batched_tokens, args.concurrency),
        num_gpu_blocks_override=num_blocks + 1,
        swap_space=args.swap_space if mode == "on" else 0.0,
    )


def take_turn(llm: Any, conversations: Sequence[Conversation], answer_len: int) -> list[float]:
    """Each conversation gets its answer appended; times to first token in milliseconds."""
    params = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True)
    start = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in conversations], params, use_tqdm=False)
    for ids, output in zip(conversations, outputs, strict=True):
        ids += output.outputs[0].token_ids
    return [(output.metrics.first_token_time_s - start) * 1e3 for output in outputs]


def run_mode(args: argparse.Namespace, mode: str) -> tuple[dict[str, Any], list[Conversation]]:
    """Figures of one mode, and its conversations in full."""
    llm = build_llm(args, mode)
    take_turn(llm, [[999, *range(100, 100 + args.message_len)]] * args.concurrency, args.answer_len)
    llm.reset_prefix_cache()
    messages = make_messages(args.conversations, args.turns, args.message_len)
    conversations: list[Conversation] = [[] for _ in messages]
    before = llm.stats()
    ttft_ms: list[list[float]] = []
    start = time.monotonic()
    for turn in range(args.turns):
        ttft_ms.append([])
        for first in range(0, args.conversations, args.concurrency):
            group = conversations[first : first + args.concurrency]
            for ids, texts in zip(group, messages[first : first + args.concurrency], strict=True):
                ids += texts[turn]
            ttft_ms[-1] += take_turn(llm, group, args.answer_len)
    wall_s = time.monotonic() - start
    after = llm.stats()

    def since(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    everything = [value for turn_ms in ttft_ms for value in turn_ms]
    figures = {
        "num_device_blocks": llm.config.num_blocks - 1,
        "prompt_tokens": since("prompt_tokens_total"),
        "prompt_tokens_computed": since("prompt_tokens_computed_total"),
        "device_hit_tokens": since("prefix_cache_hits_total"),
        "host_hit_tokens": since("external_prefix_cache_hits_total"),
        "compiles_after_ready": after.compiles_after_ready_total,
        "ttft_p50_ms": percentile(everything, 50),
        "ttft_p99_ms": percentile(everything, 99),
        "ttft_p50_ms_by_turn": [percentile(turn_ms, 50) for turn_ms in ttft_ms],
        "wall_s": wall_s,
    }
    return figures, conversations


def report(figures: dict[str, dict[str, Any]]) -> str:
    columns = {
        "num_device_blocks": "device blocks",
        "prompt_tokens": "prompt tokens",
        "prompt_tokens_computed": "computed",
        "device_hit_tokens": "from device",
        "host_hit_tokens": "from host",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p99_ms": "TTFT p99 ms",
        "wall_s": "wall s",
    }
    rows = []
    for mode, one in figures.items():
        rows.append([mode, *(number(one[key], 1 if key.endswith(("_ms", "_s")) else 0) for key in columns)])
    return table(["host tier", *columns.values()], rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    figures: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[Conversation]] = {}
    for mode in args.modes:
        figures[mode], texts[mode] = run_mode(args, mode)
        gc.collect()
    first = texts[args.modes[0]]
    equal = {mode: sum(a == b for a, b in zip(first, other, strict=True)) for mode, other in texts.items()}
    print(report(figures))
    print(f"conversations equal to those of {args.modes[0]}: {equal}, of {args.conversations}")
    if args.output:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": f"{os.cpu_count()} x {platform.machine()}", "python": platform.python_version()},
            "load_average": os.getloadavg()[0],
            "arguments": {key: value for key, value in vars(args).items() if value is not None and key != "output"},
            "modes": figures,
            "equal_conversations": equal,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if len(set(equal.values())) > 1:
        raise SystemExit("the modes gave different texts")


if __name__ == "__main__":
    main()
