"""Milliseconds of the sampler alone, per kind of request: ``python benchmarks/sampler.py``.

All rows of a batch ask for the same. The logits are normal with a standard deviation of 2.5,
so that top-p alone keeps thousands of tokens: the worst case of its search.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.engine.sampler import RowState, SamplingInputs, sample

SHAPES = ((64, 49_152), (256, 128_256))
"""Rows and vocabulary: SmolLM2 and Llama 3."""
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 1000, top_p 0.9": {"temperature": 1.0, "top_k": 1000, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "bias": {"use_bias": True},
    "min_tokens": {"suppress_stop": True},
    "mask": {"use_mask": True},
    "logprobs": {"num_logprobs": 20},
}


def make_inputs(rows: int, options: dict[str, Any]) -> SamplingInputs:
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "choice": 0,
        "position": 0,
        "num_logprobs": -1,
        "suppress_stop": False,
        "use_bias": False,
        "use_mask": False,
    }
    types = {float: jnp.float32, int: jnp.int32, bool: jnp.bool_}
    fields = {name: jnp.full(rows, options.get(name, value), types[type(value)]) for name, value in defaults.items()}
    return SamplingInputs(seed=jnp.asarray(np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)), **fields)


def milliseconds(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(best, median) of ``repeats`` calls after one that is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), statistics.median(times)


def measure(rows: int, vocab_size: int, repeats: int) -> None:
    logits = np.random.default_rng(0).normal(size=(rows, vocab_size)).astype(np.float32) * np.float32(2.5)
    state = RowState(
        output_counts=jnp.zeros((rows, vocab_size), jnp.int32),
        prompt_mask=jnp.zeros((rows, vocab_size), jnp.bool_),
        bias_ids=jnp.full((rows, 300), vocab_size, jnp.int32),
        bias_values=jnp.zeros((rows, 300), jnp.float32),
        stop_ids=jnp.full((rows, 128), vocab_size, jnp.int32),
    )
    arguments = (state, jnp.arange(rows, dtype=jnp.int32), jnp.full((rows, -(-vocab_size // 32)), -1, jnp.int32))
    device_logits = jnp.asarray(logits)
    program = jax.jit(sample, static_argnames="vocab_size")
    start = time.perf_counter()
    lowered = program.lower(device_logits, make_inputs(rows, {}), *arguments, vocab_size=vocab_size)
    compiled = lowered.compile()
    print(f"\n{rows} rows x {vocab_size} ({jax.devices()[0].device_kind}, jax {jax.__version__})")
    print(f"compiled in {time.perf_counter() - start:.1f} s\n| mode | best ms | median ms |\n|---|---|---|")
    for name, options in MODES.items():
        inputs = make_inputs(rows, options)
        call = functools.partial(compiled, device_logits, inputs, *arguments)
        best, median = milliseconds(call, repeats)
        print(f"| {name} | {best:.2f} | {median:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--shape", metavar="ROWSxVOCAB", help="one shape instead of the two usual ones")
    options = parser.parse_args()
    shapes = [tuple(map(int, options.shape.split("x")))] if options.shape else SHAPES
    for rows, vocab_size in shapes:
        measure(rows, vocab_size, options.repeats)


if __name__ == "__main__":
    main()
