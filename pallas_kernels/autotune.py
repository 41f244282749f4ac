"""Finds the sizes of the Mosaic kernels by measuring: candidates, how each is timed, which is the best.

A sweep goes in rounds. Each round varies some sizes and keeps the best of all so far, so that a few dozen candidates
do where their product would be hundreds. One that does not compile, spills registers or gives an error is recorded
and left out. Here the attention kernels; products are in ``autotune_products.py``.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .aot import compile_program
from .paged_attention import config as decode_config
from .paged_attention import paged_attention
from .ragged_paged_attention import config as mixed_config
from .ragged_paged_attention import ragged_paged_attention
from .tuning import facts_of, forced, num_multiprocessors
from .xla_options import step_compiler_options

OPERATIONS = ("paged_attention", "ragged_paged_attention")
SHARED_MEMORY_BYTES = 227 * 1024
"""Of a thread block on Hopper."""
POOL_BYTES = 2 << 30
"""Of the pools that the layers of a timed chain take turns with: far more than the L2 cache."""
REPEATS, TARGET_S, WARM_UP_CALLS = 5, 0.04, 3

Config = Any
"""The sizes of an operation: its ``MosaicTuningConfig``, or what stands for it."""
Rows = tuple[tuple[int, int], ...]
"""(query_len, seq_len) of each row."""
Round = Callable[[Config], Iterator[Config]]
"""Candidates around the best config so far."""
Measure = Callable[[Config], tuple[float, ...]]
"""Seconds of a layer with a config, for each workload; raises CandidateError."""


class CandidateError(Exception):
    """A candidate cannot be used; the message says why."""


class Task(Protocol):
    """One kernel, and the calls that it is tuned for."""

    @property
    def operation(self) -> str:
        """Whose file the best sizes go to."""

    @property
    def title(self) -> str:
        """For a person: what is measured."""

    def when(self) -> dict[str, Any]:
        """The conditions of the entry in the file."""

    def default(self) -> Config:
        """What the kernel takes where nothing was measured; always the first candidate."""

    def rounds(self) -> Sequence[Round]: ...

    def measure(self, config: Config) -> tuple[float, ...]:
        """On the GPU that JAX runs on: see ``Measure``."""

    def fields(self, config: Config) -> dict[str, Any]:
        """What of a config is written down."""


@dataclass(frozen=True)
class TuningShape:
    """What the attention kernels are tuned for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """Of the pool; None: as queries."""

    def when(self) -> dict[str, Any]:
        """The conditions of the entry in the file."""
        q = jax.ShapeDtypeStruct((1, self.num_heads, self.head_dim), jnp.dtype(self.dtype))
        pool = (1, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return facts_of(q, jax.ShapeDtypeStruct(pool, self.pool_dtype))

    @property
    def pool_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.kv_dtype or self.dtype)

    @property
    def widens(self) -> bool:
        """Whether the kernels convert what they read."""
        return self.pool_dtype != jnp.dtype(self.dtype)


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


def sweep(task: Task, measure: Measure) -> list[Trial]:
    """Measures the candidates; the best one first, those that cannot be used last. ``measure`` is ``task.measure``, or
    stands for it.

    Raises CandidateError, naming the first reason, if none can be used.
    """
    trials: dict[Config, Trial] = {}
    best = task.default()
    for candidates in task.rounds():
        for config in candidates(best):
            if config not in trials:
                trials[config] = _try(config, measure)
        usable = [trial for trial in trials.values() if trial.seconds is not None]
        if usable:
            best = min(usable, key=lambda trial: trial.score).config
    ordered = sorted(trials.values(), key=lambda t: math.inf if t.seconds is None else t.score)
    if ordered[0].seconds is None:
        raise CandidateError(f"no candidate of {task.operation} can be used; the first: {ordered[0].error}")
    return ordered


def _try(config: Config, measure: Measure) -> Trial:
    try:
        return Trial(config, measure(config))
    except Exception as error:  # whatever a compiler or a driver raises: the sweep goes on
        return Trial(config, None, f"{type(error).__name__}: {error}"[:500])


@dataclass(frozen=True)
class AttentionTask:
    """One of the attention kernels, in a model that allows ``max_model_len`` tokens."""

    operation: str
    shape: TuningShape
    max_model_len: int

    @property
    def title(self) -> str:
        cases = ", ".join(workloads(self.operation, self.max_model_len))
        return f"{self.operation}, KV cache of {self.shape.pool_dtype}: {cases}"

    def when(self) -> dict[str, Any]:
        return self.shape.when()

    def default(self) -> Config:
        head_dim, itemsize = self.shape.head_dim, self.shape.pool_dtype.itemsize
        if self.operation == "paged_attention":
            return decode_config.mosaic_tuning(head_dim, itemsize, num_multiprocessors())
        return mixed_config.mosaic_tuning(head_dim, num_multiprocessors())

    def rounds(self) -> Sequence[Round]:
        tiles = partial(_tile_candidates, self.shape)
        if self.operation == "paged_attention":
            return (tiles, _split_candidates)
        return (tiles, _raw_candidates) if self.shape.widens else (tiles,)

    def measure(self, config: Config) -> tuple[float, ...]:
        with forced(self.operation, asdict(config)):
            rows = workloads(self.operation, self.max_model_len).values()
            return tuple(time_rows(self.operation, self.shape, case) for case in rows)

    def fields(self, config: Config) -> dict[str, Any]:
        """Without the number of thread blocks of the mixed kernel, which the GPU decides."""
        return {name: value for name, value in asdict(config).items() if name != "num_ctas"}


def _tile_candidates(shape: TuningShape, best: Config) -> Iterator[Config]:
    """Tiles of keys and stages whose buffers fit in shared memory."""
    yield best
    for tile_kv in (64, 128, 256):
        for stages in (2, 3, 4, 6):
            if tile_kv % shape.block_size:
                continue
            changes = {"tile_kv": tile_kv, "stages": stages}
            if hasattr(best, "min_keys_per_item"):
                changes["min_keys_per_item"] = max(best.min_keys_per_item, tile_kv)
            candidate = replace(best, **changes)
            if buffer_bytes(shape, candidate) <= SHARED_MEMORY_BYTES:
                yield candidate


def buffer_bytes(shape: TuningShape, config: Config) -> int:
    """Of the tiles of keys and values in shared memory. A float8 pool's are widened there: one at a time in decode, all
    stages in mixed attention."""
    tile = config.tile_kv * shape.head_dim
    narrow, wide = tile * shape.pool_dtype.itemsize, tile * jnp.dtype(shape.dtype).itemsize
    if not shape.widens:
        return 2 * config.stages * wide
    if isinstance(config, decode_config.MosaicTuningConfig):
        return 2 * config.stages * narrow + wide
    return 2 * config.stages * wide + config.raw_stages * narrow


def _raw_candidates(best: mixed_config.MosaicTuningConfig) -> Iterator[mixed_config.MosaicTuningConfig]:
    """How many tiles of a float8 pool are on their way."""
    for raw_stages in (1, 2, 3, 4):
        yield replace(best, raw_stages=raw_stages)


def _split_candidates(best: decode_config.MosaicTuningConfig) -> Iterator[decode_config.MosaicTuningConfig]:
    """How rows are cut up."""
    for min_keys in (128, 256, 512, 1024):
        for waves in (1, 2, 4, 8):
            if min_keys % best.tile_kv == 0:
                blocks = waves * num_multiprocessors()
                yield replace(best, min_keys_per_item=min_keys, target_thread_blocks=blocks)


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


def time_rows(operation: str, shape: TuningShape, rows: Rows) -> float:
    """Seconds of one layer of attention. Raises CandidateError for a kernel that spills."""
    q, pools, arrays = make_arrays(shape, rows)
    program = compile_candidate(chain(operation, shape), q, pools, arrays)
    return time_calls(lambda q: program(q, pools, arrays), q) / len(pools)


def compile_candidate(function: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """``function``, its first argument donated, for this GPU. Raises CandidateError for a kernel that spills."""
    program = jax.jit(function, donate_argnums=0)
    options = step_compiler_options(jax.default_backend())
    check_spills(lambda: program.lower(*args), options)
    return program.lower(*args).compile(compiler_options=options or None)


def time_calls(call: Callable[[jax.Array], jax.Array], carry: jax.Array) -> float:
    """Seconds of ``carry = call(carry)``: the median over chains of calls that are dispatched without waiting."""
    for _ in range(WARM_UP_CALLS):
        carry = call(carry)
    carry.block_until_ready()
    began = time.perf_counter()
    carry = call(carry).block_until_ready()
    calls = max(1, min(1000, round(TARGET_S / (time.perf_counter() - began))))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            carry = call(carry)
        carry.block_until_ready()
        seconds.append((time.perf_counter() - began) / calls)
    return statistics.median(seconds)


def check_spills(lower: Callable[[], jax.stages.Lowered], options: dict[str, Any]) -> None:
    """Raises CandidateError if a Mosaic kernel that is compiled for the program spills registers."""
    for kernel in compile_program(lower, options).kernels:
        if kernel.spill_bytes:
            raise CandidateError(f"{kernel.name} spills {kernel.spill_bytes} bytes of registers")


def chain(operation: str, shape: TuningShape, interpret: Any = None) -> Callable[..., jax.Array]:
    """Layers after one another, each over a pool of its own: a result is a part of the next query, so that none
    begins before the one before it has ended."""
    scale, common = shape.head_dim**-0.5, {"implementation": "mosaic", "interpret": interpret}

    def run(q: jax.Array, pools: list[jax.Array], arrays: dict[str, jax.Array]) -> jax.Array:
        tables, lens = arrays["tables"], arrays["lens"]
        for pool in pools:
            if operation == "paged_attention":
                q = paged_attention(q, pool, tables, lens, scale=1.0, **common)
            else:
                out = ragged_paged_attention(q, pool, tables, arrays["starts"], lens, scale=scale, **common)
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
    num_pools = max(2, min(32, POOL_BYTES // (math.prod(pool_shape) * shape.pool_dtype.itemsize)))
    starts = np.cumsum([0] + [query_len for query_len, _ in rows])
    q = normal((int(starts[-1]), shape.num_heads, shape.head_dim), shape.dtype, 0)
    arrays = {
        "tables": jnp.asarray(tables),
        "lens": jnp.asarray([seq_len for _, seq_len in rows], jnp.int32),
        "starts": jnp.asarray(starts, jnp.int32),
    }
    return q, [normal(pool_shape, shape.pool_dtype.name, 1 + index) for index in range(num_pools)], arrays


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Random numbers on the device; time is not to be measured on zeros."""
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, jnp.bfloat16).astype(dtype)
