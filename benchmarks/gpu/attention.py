"""Decode and mixed attention at sizes of real use: microseconds of one layer, by Mosaic and by plain JAX.

A call is a chain of layers, each with a pool of its own, so that nothing of a pool is in a cache when its turn comes.
Decode: a layer's result is the next one's query (with a scale of 1 its numbers stay around 1), so nothing but the
attention is timed. Mixed: the query is a fixed random one, of which two tokens are overwritten by results, so that the
layers wait for each other; that costs some 2 microseconds a layer, which are counted. Work lists are planned before.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.xla_options import step_compiler_options

from .batches import Batch, Heads, make_batch
from .calls import CallOptions, make_call, mosaic_obstacle
from .parts import Options, Report
from .timing import time_chain

LLAMA_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
POOL_BYTES = {"decode": 4 << 30, "mixed": 1 << 29}
"""Of all layers' pools together, about: decode is bound by reading them, mixed calls by products."""
MAX_LAYERS = 32


@dataclass(frozen=True)
class Case:
    """Rows of (query_len, seq_len)."""

    name: str
    rows: tuple[tuple[int, int], ...]


CASES = {
    "decode": (
        Case("decode 64 x 1k", ((1, 1024),) * 64),
        Case("decode 64 x 4k", ((1, 4096),) * 64),
        Case("decode 256 x 1k", ((1, 1024),) * 256),
        Case("decode 1 x 32k", ((1, 32768),)),
    ),
    "mixed": (
        Case("prefill 8k", ((8192, 8192),)),
        Case("prefill 2k", ((2048, 2048),)),
        Case("2k after 6k of history", ((2048, 8192),)),
        Case("63 decodes of 1k and a chunk of 1985 after 1k", ((1, 1024),) * 63 + ((1985, 3009),)),
    ),
}
SMOKE_HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=64)
SMOKE_CASES = {
    "decode": (Case("decode 2 x 40", ((1, 40),) * 2),),
    "mixed": (Case("prefill 9 after 11", ((9, 20),)),),
}


def run(report: Report, options: Options) -> None:
    """``options.arguments``: "decode" or "mixed"."""
    (operation,) = options.arguments
    heads = SMOKE_HEADS if options.smoke else LLAMA_8B
    obstacle = mosaic_obstacle()
    for case in (SMOKE_CASES if options.smoke else CASES)[operation]:
        rows = list(case.rows)
        batch = make_batch(rows, heads, num_pools=1 if options.smoke else num_layers(operation, heads, rows))
        facts = {"rows": len(rows), "bytes": heads.bytes(rows), "flops": heads.flops(rows)}
        for implementation in ("mosaic", "xla"):
            if implementation == "mosaic" and obstacle is not None:
                report.skip_figure(case.name, obstacle, implementation=implementation)
                continue
            with report.guard(case.name, implementation=implementation):
                figures = time_layers(operation, implementation, batch, smoke=options.smoke)
                report.add(case.name, implementation=implementation, **facts, **figures)
        del batch


def num_layers(operation: str, heads: Heads, rows: list[tuple[int, int]]) -> int:
    """Layers of a chain: no fewer than two, so that a pool is not its own successor."""
    blocks = sum(-(-seq_len // heads.block_size) for _, seq_len in rows)
    pool = blocks * heads.block_size * 2 * heads.num_kv_heads * heads.head_dim * 2
    return max(2, min(MAX_LAYERS, POOL_BYTES[operation] // pool))


def time_layers(operation: str, implementation: str, batch: Batch, *, smoke: bool) -> dict[str, float]:
    """Microseconds of one layer."""
    is_decode = operation == "decode"
    scale = 1.0 if is_decode else batch.q.shape[2] ** -0.5
    call, arrays = make_call(operation, implementation, batch, CallOptions(scale))

    def chain(q: jax.Array, pools: list[jax.Array], arrays: dict[str, Any]) -> jax.Array:
        for pool in pools:
            out = call(q, pool, arrays)
            # A scatter of two: of one, XLA makes a copy on another stream, which cuts the command buffer in pieces.
            q = out if is_decode else q.at[jnp.arange(2)].set(out[:2])
        return q

    options = step_compiler_options(jax.default_backend()) or None
    program = jax.jit(chain, donate_argnums=0).lower(batch.q, batch.pools, arrays).compile(compiler_options=options)
    first = jnp.array(batch.q)  # a copy: the first call's is donated
    timing = time_chain(lambda q: program(q, batch.pools, arrays), first, jax.block_until_ready, smoke=smoke)
    return timing.microseconds(per=len(batch.pools))
