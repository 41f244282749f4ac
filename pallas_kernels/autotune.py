"""Finds the sizes of the Mosaic kernels by measuring: candidates, how each is timed, which is the best.

A sweep goes in rounds. Each round varies some sizes and keeps the best of all so far, so that a few dozen candidates
do where their product would be hundreds. One that does not compile, spills registers or gives an error is recorded
and left out.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .aot import compile_program
from .paged_attention import config as decode_config
from .paged_attention import paged_attention
from .ragged_paged_attention import config as mixed_config
from .ragged_paged_attention import ragged_paged_attention
from .tuning import facts_of, forced
from .xla_options import step_compiler_options

OPERATIONS = ("paged_attention", "ragged_paged_attention")
SHARED_MEMORY_BYTES = 227 * 1024
"""Of a thread block on Hopper."""
POOL_BYTES = 2 << 30
"""Of the pools that the layers of a timed chain take turns with: far more than the L2 cache."""
REPEATS, TARGET_S, WARM_UP_CALLS = 5, 0.04, 3

Config = Any
"""A ``MosaicTuningConfig`` of either operation."""
Rows = tuple[tuple[int, int], ...]
"""(query_len, seq_len) of each row."""


class CandidateError(Exception):
    """A candidate cannot be used; the message says why."""


@dataclass(frozen=True)
class TuningShape:
    """What the kernels are tuned for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"

    def when(self) -> dict[str, Any]:
        """The conditions of the entry in the file."""
        q = jax.ShapeDtypeStruct((1, self.num_heads, self.head_dim), jnp.dtype(self.dtype))
        pool = (1, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return facts_of(q, jax.ShapeDtypeStruct(pool, q.dtype))

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Trial:
    """What became of one candidate."""

    config: Config
    seconds: tuple[float, ...] | None
    """Of one layer, for each workload; None if it cannot be used."""
    error: str | None = None

    @property
    def score(self) -> float:
        """The geometric mean of the workloads: each counts as much, however long it takes."""
        assert self.seconds is not None
        return math.exp(statistics.fmean(map(math.log, self.seconds)))

    def as_dict(self) -> dict[str, Any]:
        """For a log of the sweep, in microseconds."""
        times = None if self.seconds is None else [round(s * 1e6, 2) for s in self.seconds]
        return {"config": asdict(self.config), "microseconds": times, "error": self.error}


Measure = Callable[[Config], tuple[float, ...]]
"""Seconds of a layer with a config, for each workload; raises CandidateError."""


def sweep(operation: str, shape: TuningShape, measure: Measure) -> list[Trial]:
    """Measures the candidates; the best one first, those that cannot be used last.

    Raises CandidateError, naming the first reason, if none can be used.
    """
    trials: dict[Config, Trial] = {}
    best = default_config(operation, shape)
    for candidates in rounds(operation, shape):
        for config in candidates(best):
            if config not in trials:
                trials[config] = _try(config, measure)
        usable = [trial for trial in trials.values() if trial.seconds is not None]
        if usable:
            best = min(usable, key=lambda trial: trial.score).config
    ordered = sorted(trials.values(), key=lambda t: math.inf if t.seconds is None else t.score)
    if ordered[0].seconds is None:
        raise CandidateError(f"no candidate of {operation} can be used; the first: {ordered[0].error}")
    return ordered


def _try(config: Config, measure: Measure) -> Trial:
    try:
        return Trial(config, measure(config))
    except Exception as error:  # whatever a compiler or a driver raises: the sweep goes on
        return Trial(config, None, f"{type(error).__name__}: {error}"[:500])


def default_config(operation: str, shape: TuningShape) -> Config:
    """What the kernels take where nothing was measured; always the first candidate."""
    if operation == "paged_attention":
        return decode_config.mosaic_tuning(shape.head_dim, shape.itemsize)
    return mixed_config.mosaic_tuning(shape.head_dim)


def rounds(operation: str, shape: TuningShape) -> Sequence[Callable[[Config], Iterator[Config]]]:
    """Each gives candidates around the best config so far."""
    tiles = partial(_tile_candidates, shape)
    return (tiles, _split_candidates) if operation == "paged_attention" else (tiles,)


def _tile_candidates(shape: TuningShape, best: Config) -> Iterator[Config]:
    """Tiles of keys and stages whose buffers fit in shared memory."""
    yield best
    for tile_kv in (64, 128, 256):
        for stages in (2, 3, 4, 6):
            if stages * 2 * tile_kv * shape.head_dim * shape.itemsize > SHARED_MEMORY_BYTES:
                continue
            if tile_kv % shape.block_size:
                continue
            changes = {"tile_kv": tile_kv, "stages": stages}
            if hasattr(best, "min_keys_per_item"):
                changes["min_keys_per_item"] = max(best.min_keys_per_item, tile_kv)
            yield replace(best, **changes)


def _split_candidates(best: decode_config.MosaicTuningConfig) -> Iterator[decode_config.MosaicTuningConfig]:
    """How rows are cut up."""
    for min_keys in (128, 256, 512, 1024):
        for target in (132, 264, 528, 1056):
            if min_keys % best.tile_kv == 0:
                yield replace(best, min_keys_per_item=min_keys, target_thread_blocks=target)


def workloads(operation: str, max_model_len: int) -> dict[str, Rows]:
    """What a config is judged by: each is a name and rows, cut to contexts that the model allows."""
    if operation == "paged_attention":
        named = {"64 x 1k": (64, 1024), "256 x 1k": (256, 1024), "64 x 4k": (64, 4096), "1 x 32k": (1, 32768)}
        return {name: ((1, min(length, max_model_len)),) * rows for name, (rows, length) in named.items()}
    long = min(8192, max_model_len)
    chunk = min(2048, long)
    return {
        "prefill": ((chunk, chunk),),
        "long prefill": ((long, long),),
        "chunk with history": ((chunk, long),),
        "chunk beside decodes": ((1, min(1024, long)),) * 63 + ((chunk, chunk),),
    }


class GpuMeasure:
    """Times candidates on the GPU that JAX runs on."""

    def __init__(self, operation: str, shape: TuningShape, cases: Sequence[Rows]) -> None:
        self._operation, self._shape, self._cases = operation, shape, cases

    def __call__(self, config: Config) -> tuple[float, ...]:
        """Seconds of one layer for each case. Raises CandidateError for a kernel that spills."""
        with forced(self._operation, asdict(config)):
            return tuple(self._time(rows) for rows in self._cases)

    def _time(self, rows: Rows) -> float:
        program, q, pools, arrays = self._compile(rows)
        for _ in range(WARM_UP_CALLS):
            q = program(q, pools, arrays)
        q.block_until_ready()
        began = time.perf_counter()
        q = program(q, pools, arrays).block_until_ready()
        calls = max(1, min(1000, round(TARGET_S / (time.perf_counter() - began))))
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(calls):
                q = program(q, pools, arrays)
            q.block_until_ready()
            seconds.append((time.perf_counter() - began) / (calls * len(pools)))
        return statistics.median(seconds)

    def _compile(self, rows: Rows) -> tuple[Any, jax.Array, list[jax.Array], dict[str, jax.Array]]:
        q, pools, arrays = make_arrays(self._shape, rows)
        program = jax.jit(chain(self._operation, self._shape), donate_argnums=0)
        options = step_compiler_options(jax.default_backend())
        check_spills(lambda: program.lower(q, pools, arrays), options)
        return program.lower(q, pools, arrays).compile(compiler_options=options or None), q, pools, arrays


def check_spills(lower: Callable[[], jax.stages.Lowered], options: dict[str, Any]) -> None:
    """Raises CandidateError if a Mosaic kernel that is compiled for the program spills registers."""
    for kernel in compile_program(lower, options).kernels:
        if kernel.spill_bytes:
            raise CandidateError(f"{kernel.name} spills {kernel.spill_bytes} bytes of registers")


def chain(operation: str, shape: TuningShape) -> Callable[..., jax.Array]:
    """Layers after one another, each over a pool of its own: a result is a part of the next query, so that none
    begins before the one before it has ended."""
    scale = shape.head_dim**-0.5

    def run(q: jax.Array, pools: list[jax.Array], arrays: dict[str, jax.Array]) -> jax.Array:
        tables, lens = arrays["tables"], arrays["lens"]
        for pool in pools:
            if operation == "paged_attention":
                q = paged_attention(q, pool, tables, lens, scale=1.0, implementation="mosaic")
            else:
                out = ragged_paged_attention(
                    q, pool, tables, arrays["starts"], lens, scale=scale, implementation="mosaic"
                )
                q = q.at[jnp.arange(2)].set(out[:2])  # of one token, XLA would make a copy outside the command buffer
        return q

    return run


def make_arrays(shape: TuningShape, rows: Rows) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """Random queries and pools on the device, blocks in random order, and the rows' tables and lengths."""
    rng = np.random.default_rng(0)
    counts = [-(-seq_len // shape.block_size) for _, seq_len in rows]
    ids = rng.permutation(sum(counts)) + 1
    tables = np.zeros((len(rows), max(counts)), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = ids[end - count : end]
    pool_shape = (sum(counts) + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    num_pools = max(2, min(32, POOL_BYTES // (math.prod(pool_shape) * shape.itemsize)))
    starts = np.cumsum([0] + [query_len for query_len, _ in rows])
    q = _normal((int(starts[-1]), shape.num_heads, shape.head_dim), shape.dtype, 0)
    arrays = {
        "tables": jnp.asarray(tables),
        "lens": jnp.asarray([seq_len for _, seq_len in rows], jnp.int32),
        "starts": jnp.asarray(starts, jnp.int32),
    }
    return q, [_normal(pool_shape, shape.dtype, 1 + index) for index in range(num_pools)], arrays


@partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, jnp.bfloat16).astype(dtype)
