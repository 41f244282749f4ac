"""Models and an engine on 8 virtual CPU devices, against one; a process of its own, since their number is fixed early.

Prints one JSON record a case. A case that hangs ends the process, naming itself on standard error.
"""

import faulthandler
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny_model import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
tp_matrix = importlib.import_module("tp_matrix")

from octavo import LLM, SamplingParams  # noqa: E402
from octavo.models.architectures.base import WeightMapping  # noqa: E402

LIMIT_S = 250.0
Piece = tuple[int, int, int, int]
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
PROMPTS = [[*SHARED, *(20 + 3 * i + j for j in range(14 + i))] for i in range(3)]


def every_architecture(folder: Path) -> Iterator[dict[str, Any]]:
    """On two devices, one step."""
    for name in tp_matrix.cases():
        if not name.startswith("llama_"):
            yield against_one(folder, name, 2)


def hard_to_share(folder: Path) -> Iterator[dict[str, Any]]:
    """2 KV heads on 2, 4 and 8 devices, and a vocabulary of 301; prefill and decode."""
    for devices in (2, 4, 8):
        yield against_one(folder, "llama_vocab_301", devices, decode_steps=1)
    yield against_one(folder, "olmo2", 4)


def quantized(folder: Path) -> Iterator[dict[str, Any]]:
    """Through a whole model; ``quantized_shards.py`` has a layer in every way of quantising."""
    known = tp_matrix.quantized_cases()
    for name, devices in (("gptq-4-act", 8), ("fp8-blocks-128", 4)):
        case = known[name]
        case.write(folder / name)
        one, several = (run_quantized(folder / name, count, case.quantization) for count in (1, devices))
        yield record_of(name, devices, several, one)


def run_quantized(checkpoint: Path, devices: int, quantization: str | None) -> Any:
    tp_matrix.watch(f"{checkpoint.name} on {devices} devices", LIMIT_S)
    return tp_matrix.run(checkpoint, devices, 1, quantization=quantization)


def wrong_orders(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows as on one device, and each shard the other KV head: both must be told apart from what is right."""
    pieces = WeightMapping.pieces

    def unsplit(mapping: WeightMapping, num_shards: int) -> Iterator[Piece]:
        return pieces(mapping, 1)

    def other_heads(mapping: WeightMapping, num_shards: int) -> Iterator[Piece]:
        for source, start, stop, place in pieces(mapping, num_shards):
            rows = mapping.shapes[source][0]
            swapped = mapping.copies and source > 0
            yield (source, rows - stop, rows - start, place) if swapped else (source, start, stop, place)

    for wrong, devices in ((unsplit, 2), (other_heads, 4)):
        expected_of(folder, "llama_vocab_301", 1)
        with changed(WeightMapping, "pieces", wrong):
            record = against_one(folder, "llama_vocab_301", devices, decode_steps=1)
        yield {**record, "case": wrong.__name__}


def against_one(folder: Path, name: str, devices: int, decode_steps: int = 0) -> dict[str, Any]:
    expected = expected_of(folder, name, decode_steps)
    tp_matrix.watch(f"{name} on {devices} devices", LIMIT_S)
    return record_of(name, devices, tp_matrix.run(folder / name, devices, decode_steps), expected)


def record_of(name: str, devices: int, found: Any, expected: Any) -> dict[str, Any]:
    same = bool(np.array_equal(found.token_ids, expected.token_ids))
    return {"case": name, "devices": devices, "error": found.error_from(expected), "same_tokens": same}


@cache
def expected_of(folder: Path, name: str, decode_steps: int) -> Any:
    if not (folder / name).exists():
        tp_matrix.write_checkpoint(folder / name, shallow(tp_matrix.cases()[name]))
    tp_matrix.watch(f"{name} on 1 device", LIMIT_S)
    return tp_matrix.run(folder / name, 1, decode_steps)


def shallow(config: dict[str, Any]) -> dict[str, Any]:
    """With the first layer only, which compiles sooner; layers with experts may come later, so those keep all."""
    if "text_config" in config:
        return {**config, "text_config": shallow(config["text_config"])}
    if {"num_experts", "num_local_experts"} & set(config):
        return config
    cut = {name: 1 for name in ("num_hidden_layers", "n_layer") if name in config}
    cut |= {name: config[name][:1] for name in ("layer_types", "no_rope_layers") if config.get(name)}
    return {**config, **cut}


def engines(folder: Path) -> Iterator[dict[str, Any]]:
    """A small pool, so that requests are preempted; chunks of 8 tokens; a host tier; the first prompts once more."""
    model, texts = tiny_model(folder / "engine", vocab_size=301), []
    for count in (1, 2):
        tp_matrix.watch(f"an engine on {count} devices", LIMIT_S)
        llm = LLM(
            model=str(model),
            tensor_parallel_size=count,
            skip_tokenizer_init=True,
            max_model_len=48,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            block_size=4,
            num_gpu_blocks_override=16,
            swap_space=0.01,
            compile_cache_dir=str(folder / "compiled"),
        )
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        rounds = [llm.generate(PROMPTS, greedy, use_tqdm=False) for _ in range(2)]
        forked = llm.generate(PROMPTS[:1], SamplingParams(n=2, seed=3, max_tokens=6, prompt_logprobs=1), use_tqdm=False)
        outputs = [output for each in rounds for output in each] + forked
        stats = llm.stats()
        texts.append([list(choice.token_ids) for output in outputs for choice in output.outputs])
        yield {
            "case": "engine",
            "devices": count,
            "same_tokens": texts[-1] == texts[0],
            "steps_ahead": llm._core._async_scheduling,
            "choices": len(texts[-1]),
            "compiles_after_ready": stats.compiles_after_ready_total,
            "preemptions": stats.num_preemptions_total,
            "hits": stats.prefix_cache_hits_total,
            "host_hits": stats.external_prefix_cache_hits_total,
            "prompt_logprobs": [
                next(iter(entry.values())).logprob if entry else None for entry in forked[0].prompt_logprobs
            ],
        }


def float8_caches(folder: Path) -> Iterator[dict[str, Any]]:
    """2 KV heads on 2 devices, and copied to 4; last, on one device, a cache of float32."""
    case = tp_matrix.float8_cache()
    case.write(folder / "float8")
    expected = None
    for devices, dtype in (
        (1, case.kv_cache_dtype),
        (2, case.kv_cache_dtype),
        (4, case.kv_cache_dtype),
        (1, "float32"),
    ):
        tp_matrix.watch(f"a cache of {dtype} on {devices} devices", LIMIT_S)
        found = tp_matrix.run(folder / "float8", devices, 1, kv_cache_dtype=dtype)
        expected = expected or found
        yield record_of(dtype, devices, found, expected)


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def hang(folder: Path) -> Iterator[dict[str, Any]]:
    """What the watchdog is for."""
    tp_matrix.watch("a case that hangs", 0.2)
    time.sleep(60)
    yield {}


CASES: tuple[Callable[[Path], Iterator[dict[str, Any]]], ...] = (
    every_architecture,
    hard_to_share,
    quantized,
    wrong_orders,
    engines,
    float8_caches,
    hang,
)


def main(names: list[str]) -> None:
    tp_matrix.make_cpu_devices(8)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.__name__ in names:
                for record in case(Path(folder)):
                    print(json.dumps({"group": case.__name__, **record}), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
