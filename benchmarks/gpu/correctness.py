"""Both kernels against attention written the plain way, by the error of each result vector.

The error of a vector is its distance from the reference's, over the reference's length; the worst one counts, and a
NaN is infinite. The pool is NaN wherever no row has a token, so that a kernel that uses what it must not is found out.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference

from .batches import Batch, Heads, make_batch
from .calls import CallOptions, make_call, mosaic_obstacle
from .parts import Options, Report

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}
KV_SCALES = (0.5, 0.25)
COMPILE_THREADS = 8


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    operation: str
    heads: Heads
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    @property
    def options(self) -> CallOptions:
        return CallOptions(self.heads.head_dim**-0.5, self.window, self.softcap)

    @property
    def sinks(self) -> jax.Array | None:
        return jnp.linspace(-1.0, 3.0, self.heads.num_heads) if self.has_sinks else None


def decodes(*lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, n) for n in lens)


LENGTHS = decodes(1, 15, 16, 17, 129, 1000, 4097, 33)
MIXED = ((1, 500), (130, 130), (1, 1), (70, 600), (17, 17), (64, 200))
"""Short enough for the reference, which gathers all keys for each query."""
LLAMA, QWEN = Heads(32, 8, 128), Heads(28, 4, 128)
CASES = (
    Case("decode group 4", "decode", LLAMA, LENGTHS),
    Case("decode group 7", "decode", QWEN, LENGTHS),
    Case("decode group 1, head_dim 64, blocks of 32", "decode", Heads(8, 8, 64, 32), LENGTHS),
    Case("decode group 16, head_dim 96, float16", "decode", Heads(16, 1, 96), LENGTHS, dtype="float16"),
    Case("decode head_dim 256, window, softcap", "decode", Heads(16, 8, 256), LENGTHS, window=300, softcap=30.0),
    Case("decode sinks, window, blocks of 64", "decode", Heads(32, 8, 128, 64), LENGTHS, window=128, has_sinks=True),
    Case("decode fp8 pool", "decode", LLAMA, LENGTHS, kv_dtype="float8_e4m3fn"),
    Case("mixed group 4", "mixed", LLAMA, MIXED),
    Case("mixed group 7", "mixed", QWEN, MIXED),
    Case("mixed group 1, head_dim 64, blocks of 32", "mixed", Heads(8, 8, 64, 32), MIXED),
    Case("mixed group 16, head_dim 96, float16", "mixed", Heads(16, 1, 96), MIXED, dtype="float16"),
    Case("mixed head_dim 256, window, softcap", "mixed", Heads(16, 8, 256), MIXED, window=300, softcap=30.0),
    Case("mixed sinks, window, blocks of 64", "mixed", Heads(32, 8, 128, 64), MIXED, window=128, has_sinks=True),
    Case("mixed fp8 pool", "mixed", LLAMA, MIXED, kv_dtype="float8_e4m3fn"),
)
TINY = Heads(4, 2, 64)
SMOKE_CASES = (
    Case("decode group 2", "decode", TINY, decodes(1, 33)),
    Case("decode fp8 pool", "decode", TINY, decodes(20), kv_dtype="float8_e4m3fn"),
    Case("mixed group 2, window", "mixed", TINY, ((9, 20),), window=8),
)


def run(report: Report, options: Options) -> None:
    """A figure for each case and implementation: the worst error, the tolerance, and whether it is kept."""
    cases = SMOKE_CASES if options.smoke else CASES
    obstacle = mosaic_obstacle()
    with ThreadPoolExecutor(1 if options.smoke else COMPILE_THREADS) as pool:
        batches = [make_case_batch(case) for case in cases]
        compiled = {
            (index, implementation): pool.submit(_compile, case, implementation, batches[index])
            for index, case in enumerate(cases)
            for implementation in (("xla",) if obstacle else ("mosaic", "xla"))
        }
        for index, case in enumerate(cases):
            if obstacle:
                report.skip_figure(case.name, obstacle, implementation="mosaic")
            wanted = None
            with report.guard(case.name, implementation="reference"):
                wanted = reference(case, batches[index])
            for implementation in ("mosaic", "xla"):
                if wanted is None or (index, implementation) not in compiled:
                    continue
                with report.guard(case.name, implementation=implementation):
                    program, arguments = compiled[index, implementation].result()
                    _compare(report, case, implementation, program(*arguments), wanted)


def make_case_batch(case: Case) -> Batch:
    return make_batch(list(case.rows), case.heads, dtype=case.dtype, kv_dtype=case.kv_dtype, poison=True)


def _compile(case: Case, implementation: str, batch: Batch) -> tuple[Any, tuple]:
    scales = jnp.asarray(KV_SCALES, jnp.float32) if case.kv_dtype else None
    call, arrays = make_call(case.operation, implementation, batch, case.options, sinks=case.sinks, kv_scales=scales)
    arguments = (batch.q, batch.pools[0], arrays)
    return jax.jit(call).lower(*arguments).compile(), arguments


def _compare(report: Report, case: Case, implementation: str, got: jax.Array, wanted: np.ndarray) -> None:
    error = worst_error(got, wanted)
    tolerance = TOLERANCE[case.dtype]
    values: dict[str, Any] = {"implementation": implementation, "worst_error": error, "tolerance": tolerance}
    if not error <= tolerance:
        values["error"] = f"a result vector is off by {error:.3g} of its length, more than {tolerance}"
    report.add(case.name, **values)


def reference(case: Case, batch: Batch) -> np.ndarray:
    """In float32, on the keys and values that the pool stands for."""
    scales = jnp.asarray(KV_SCALES if case.kv_dtype else (1.0, 1.0), jnp.float32).reshape(1, 2, 1, 1, 1)
    pool, q = batch.pools[0].astype(jnp.float32) * scales, batch.q.astype(jnp.float32)
    keywords = {"scale": case.options.scale, "window": case.window, "softcap": case.softcap, "sinks": case.sinks}
    if case.operation == "decode":
        function = jax.jit(partial(paged_attention_reference, **keywords))
        return np.asarray(function(q, pool, batch.tables, jnp.asarray(batch.lens)))
    function = jax.jit(partial(ragged_paged_attention_reference, **keywords))
    return np.asarray(function(q, pool, batch.tables, jnp.asarray(batch.starts), jnp.asarray(batch.lens)))


def worst_error(got: Any, want: Any) -> float:
    """The largest error of a vector (last axis) relative to the wanted vector's length; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error, length = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    relative = np.divide(error, length, out=np.where(error > 0, np.inf, 0.0), where=length > 0)
    return float(np.where(np.isnan(error), np.inf, relative).max())
