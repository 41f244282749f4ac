"""Times the attention operations: a step of several layers, each writing and reading a donated pool of its own.

    python benchmarks/attention.py [--layers 8] [--repeats 15] [--only smollm2] [--json attention.json]

Columns: milliseconds a layer (minimum, median, spread = (max - min) / median over the repeats), process CPU
milliseconds a layer (steadier on a shared machine), and what the minimum makes of it: GB/s of keys and values read
for decode, GFLOP/s of the visible products for mixed calls. Several layers take turns, so that no pool stays in a
cache from one call to the next.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models.kv_cache import write_kv
from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.paged_attention.shapes import DECODE_SHAPES, DecodeShape
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.shapes import MIXED_SHAPES, MixedShape


def rows_of(shape: DecodeShape | MixedShape) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each row."""
    if isinstance(shape, MixedShape):
        return list(shape.rows)
    return [(1, shape.seq_len)] * shape.num_rows


def work_of(shape: DecodeShape | MixedShape, itemsize: int) -> tuple[float, str]:
    """What one layer must at least do, and its unit per second."""
    rows = rows_of(shape)
    if isinstance(shape, DecodeShape):
        return sum(n for _, n in rows) * 2 * shape.num_kv_heads * shape.head_dim * itemsize / 1e9, "GB/s"
    visible = sum(query * (length - query) + query * (query + 1) / 2 for query, length in rows)
    return visible * 4 * shape.num_heads * shape.head_dim / 1e9, "GFLOP/s"


def build(shape: DecodeShape | MixedShape, num_layers: int, dtype: jnp.dtype) -> tuple[Callable, list, tuple]:
    """A step, its pools and its other arguments. Blocks are scattered over the pool."""
    rng = np.random.default_rng(0)
    rows = rows_of(shape)
    num_tokens = shape.num_tokens if isinstance(shape, MixedShape) else len(rows)
    size = shape.block_size
    row_blocks = [-(-length // size) for _, length in rows]
    ids = iter(rng.permutation(sum(row_blocks)) + 1)
    tables = np.zeros((len(rows), max(row_blocks)), np.int32)
    slots = np.full(num_tokens, (sum(row_blocks) + 1) * size, np.int32)
    starts = np.cumsum([0] + [query for query, _ in rows]).astype(np.int32)
    for row, (query, length) in enumerate(rows):
        tables[row, : row_blocks[row]] = [next(ids) for _ in range(row_blocks[row])]
        pos = np.arange(length - query, length)
        slots[starts[row] : starts[row + 1]] = tables[row, pos // size] * size + pos % size
    pool_shape = (sum(row_blocks) + 1, 2, shape.num_kv_heads, size, shape.head_dim)
    pools = [jnp.asarray(rng.standard_normal(pool_shape, np.float32), dtype) for _ in range(num_layers)]
    q = jnp.asarray(rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim), np.float32), dtype)
    lens = jnp.asarray([length for _, length in rows], jnp.int32)
    scale = shape.head_dim**-0.5

    def step(pools, q, slots, tables, starts, lens):
        new_pools = []
        for pool in pools:
            k = q[:, : shape.num_kv_heads]
            pool = write_kv(pool, k, k, slots)
            if isinstance(shape, MixedShape):
                q = q + ragged_paged_attention(q, pool, tables, starts, lens, scale=scale)
            else:
                q = q + paged_attention(q, pool, tables, lens, scale=scale)
            new_pools.append(pool)
        return new_pools, q

    return step, pools, (q, jnp.asarray(slots), jnp.asarray(tables), jnp.asarray(starts), lens)


def measure(shape: DecodeShape | MixedShape, num_layers: int, repeats: int, dtype: jnp.dtype) -> dict:
    step, pools, inputs = build(shape, num_layers, dtype)
    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(pools, *inputs).compile()
    compile_s = time.perf_counter() - began
    wall, cpu = [], []
    for repeat in range(repeats + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        pools, out = compiled(pools, *inputs)
        out.block_until_ready()
        if repeat:  # the first one warms up
            wall.append((time.perf_counter() - began) / num_layers * 1e3)
            cpu.append((time.process_time() - cpu_began) / num_layers * 1e3)
    work, unit = work_of(shape, jnp.dtype(dtype).itemsize)
    return {
        "shape": shape.name,
        "min_ms": min(wall),
        "median_ms": statistics.median(wall),
        "spread": (max(wall) - min(wall)) / statistics.median(wall),
        "cpu_ms": min(cpu),
        "rate": work / (min(wall) / 1e3),
        "unit": unit,
        "compile_s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="run the shapes whose name contains this")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.layers < 1 or args.repeats < 1:
        parser.error("--layers and --repeats must be at least 1")
    shapes = [shape for shape in (*DECODE_SHAPES, *MIXED_SHAPES) if args.only in shape.name]
    if not shapes:
        parser.error(f"no shape's name contains {args.only!r}")

    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {args.dtype}, {args.layers} layers a step")
    print(f"{'shape':40s} {'min ms':>8s} {'median':>8s} {'spread':>7s} {'cpu ms':>8s} {'rate':>15s} {'compile s':>10s}")
    results = []
    for shape in shapes:
        r = measure(shape, args.layers, args.repeats, jnp.dtype(args.dtype))
        results.append(r)
        print(
            f"{r['shape']:40s} {r['min_ms']:8.3f} {r['median_ms']:8.3f} {r['spread']:7.0%} {r['cpu_ms']:8.3f} "
            f"{r['rate']:7.1f} {r['unit']:7s} {r['compile_s']:10.2f}",
            flush=True,
        )
    if args.json:
        about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "layers": args.layers}
        args.json.write_text(json.dumps({**about, "dtype": args.dtype, "results": results}, indent=1))


if __name__ == "__main__":
    main()
