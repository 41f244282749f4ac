"""The Mosaic kernel of mixed attention on a CPU: interpreted with race detection, against the dense reference."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_models import GPU_MODELS
from paged_pool import worst_error

from octavo.pallas_kernels.aot import aot_missing, compile_for
from octavo.pallas_kernels.attention_common import AttentionOptions
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import load_mosaic
from octavo.pallas_kernels.packed_array import PackedArray
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention, work_spec
from octavo.pallas_kernels.ragged_paged_attention.config import mosaic_tuning
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention.work import (
    FIRST_TOKEN,
    NUM_TOKENS,
    ROW,
    TilePlan,
    max_tiles,
    plan_tiles,
)

if reason := mosaic_missing():
    pytest.skip(reason, allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

# Scores of slots that nothing wrote are NaN on their way to the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

mosaic = load_mosaic("ragged_paged_attention")
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
"""Memory that nothing wrote is NaN in the interpreter, outputs included."""
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]
    """(query_len, seq_len) of each row."""
    num_tokens: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"
    scale: float = 0.2

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.scale, self.window, self.softcap)

    @property
    def sinks(self) -> jax.Array | None:
        return jnp.linspace(-1.0, 4.0, self.num_heads) if self.has_sinks else None

    def arrays(self) -> tuple[jax.Array, ...]:
        """q, kv, block_tables, query_start_loc, seq_lens. Blocks in random order; the last two rows of more than a
        block share their first. Blocks before the window are gone from the table; the pool is NaN where no row wrote.
        """
        rng = np.random.default_rng(0)
        size = self.block_size
        counts = [-(-n // size) for _, n in self.rows]
        ids = list(rng.permutation(np.arange(1, sum(counts) + 3)))
        tables = np.zeros((len(self.rows), max(counts) + 2), np.int32)
        kv = np.full((sum(counts) + 3, 2, self.num_kv_heads, size, self.head_dim), np.nan)
        for row, count in enumerate(counts):
            tables[row, :count] = [ids.pop() for _ in range(count)]
        long = [row for row, (_, n) in enumerate(self.rows) if n > size][-2:]
        if len(long) == 2 and self.window is None:
            tables[long[1], 0] = tables[long[0], 0]
        for row, (query_len, n) in enumerate(self.rows):
            for key in range(n):
                slot = kv[tables[row, key // size], :, :, key % size]
                slot[...] = rng.standard_normal(slot.shape)
            if self.window is not None:
                tables[row, : max(0, n - query_len - self.window + 1) // size] = 0
        q = rng.standard_normal((self.num_tokens, self.num_heads, self.head_dim))
        starts = np.cumsum([0, *(query_len for query_len, _ in self.rows)])
        lens = [n for _, n in self.rows]
        ints = (jnp.asarray(x, jnp.int32) for x in (tables, starts, lens))
        return jnp.asarray(q, self.dtype), jnp.asarray(kv, self.dtype), *ints

    def reference(self) -> np.ndarray:
        """In float32."""
        q, kv, *rest = self.arrays()
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        args = (q.astype(jnp.float32), kv.astype(jnp.float32), *rest)
        return np.asarray(ragged_paged_attention_reference(*args, **options))


CASES = {
    "group 4, many rows": Case(
        8, 2, 64, 16, ((0, 0), (1, 1), (15, 15), (16, 16), (1, 17), (17, 40), (0, 30), (70, 150), (2, 3)), 131
    ),
    "group 1, float16, whole tiles": Case(2, 2, 96, 32, ((64, 70), (72, 130)), 136, dtype="float16"),
    "group 7, window": Case(7, 1, 128, 16, ((3, 200), (66, 66)), 69, window=50),
    "group 8, softcap": Case(8, 1, 64, 64, ((64, 128), (1, 64)), 72, softcap=1.5),
    "group 2, window, softcap": Case(4, 2, 256, 16, ((20, 70), (2, 20)), 24, window=40, softcap=3.0),
    "group 1, small scale": Case(1, 1, 64, 16, ((80, 90),), 80, scale=0.0625),
    "group 16, sinks": Case(16, 1, 64, 32, ((5, 69), (2, 33)), 7, has_sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name):
    """Rows with none, one and several queries, with and without history, padding tokens, permuted and shared blocks,
    NaN in every slot that no row wrote."""
    case = CASES[name]
    arrays = case.arrays()
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "sinks": case.sinks}
    if any(query_len == 1 for query_len, _ in case.rows):
        got = ragged_paged_attention(*arrays, **options, implementation="mosaic", interpret=INTERPRET)
    else:  # half the time without the decode kernel
        got = attend_tiles(case, arrays)
    assert got.dtype == jnp.dtype(case.dtype)
    assert worst_error(got, case.reference()) <= TOLERANCE[case.dtype]
    assert not np.asarray(got)[int(arrays[3][-1]) :].any()


def attend_tiles(case: Case, arrays: tuple[jax.Array, ...], **changes) -> jax.Array:
    """The kernel alone, traced afresh, so that what a test patched in it takes effect."""
    q, kv, tables, starts, lens = arrays
    options = replace(case.options, **changes)
    spec = work_spec(q, kv, tables.shape[1], window=options.window, interpret=INTERPRET)
    tuning = replace(spec.tuning, num_ctas=1)
    plan = spec.plan(np.asarray(starts), np.asarray(lens), case.num_tokens).tiles

    def run(q, kv):
        return mosaic.attend_tiles(q, kv, tables, plan, case.sinks, options, tuning, INTERPRET)

    return jax.jit(run)(q, kv)


SMALL = Case(2, 1, 64, 16, ((10, 10), (4, 200)), 14, window=150)
"""The second row's tile begins before its row and takes four turns, the stages' second round included; its last KV
tile is partly unwritten, its first begins before the window."""


def run_small(swap: bool = False, **changes) -> float:
    """The worst error."""
    q, kv, *rest = SMALL.arrays()
    got = attend_tiles(SMALL, (q, kv[:, ::-1] if swap else kv, *rest), **changes)
    return worst_error(got, SMALL.reference())


def drop_the_mask(monkeypatch):
    monkeypatch.setattr(mosaic, "_visible", lambda shape, rows, first_key: jnp.bool_(True))


def leave_unwritten_values(monkeypatch):
    monkeypatch.setattr(mosaic, "_clear_unwritten", lambda *args: None)


def shift_the_diagonal(monkeypatch):
    original = mosaic._visible

    def visible(shape, rows, first_key):
        return original(shape, rows._replace(first_pos=rows.first_pos - 1), first_key)

    monkeypatch.setattr(mosaic, "_visible", visible)


def store_a_row_off(monkeypatch):
    original = mosaic._store_rows

    def store(staged, out, rows):
        original(staged, out, rows._replace(num_rows=rows.num_rows - 1))

    monkeypatch.setattr(mosaic, "_store_rows", store)


MUTATIONS = [None, drop_the_mask, leave_unwritten_values, shift_the_diagonal, store_a_row_off]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutations_are_caught(mutate, monkeypatch):
    if mutate:
        mutate(monkeypatch)
    error = run_small()
    assert error <= 2e-2 if mutate is None else error > 5e-2


def test_swapped_keys_and_values_are_caught():
    assert run_small(swap=True) > 5e-2


@pytest.mark.parametrize("window", [149, 151])
def test_window_off_by_one_is_caught(window):
    assert run_small(window=window) > 2e-2


@pytest.mark.parametrize("tile_q", [64, 128])
def test_plan_covers_every_token_once(tile_q):
    """Rows of one query are left to decode; padding tokens have tiles of their own; the dearest tile comes first."""
    query_lens = [0, 1, 2, 63, 64, 65, 1, 130, 0, 7]
    lens = [0, 9, 2, 100, 64, 65, 1, 1000, 5, 300]
    starts, num_tokens = np.cumsum([0, *query_lens]), 400
    plan = plan_tiles(
        *(np.asarray(x, np.int32) for x in (starts, lens)), num_tokens=num_tokens, tile_q=tile_q, tile_kv=64
    )
    assert plan.tiles.shape[0] == max_tiles(num_tokens, len(lens), tile_q)
    tiles = np.asarray(plan.tiles)[: int(plan.num_tiles[0])]
    covered = np.zeros(num_tokens, int)
    for row, first, count, num_keys, seq_len in tiles:
        covered[first : first + count] += 1
        assert first // 8 * 8 + tile_q >= first + count
        if num_keys:
            assert starts[row] <= first
            assert first + count <= starts[row + 1]
            assert (num_keys, seq_len) == (lens[row] - (starts[row + 1] - (first + count)), lens[row])
    singles = [start for start, n in zip(starts, query_lens, strict=False) if n == 1]
    assert np.flatnonzero(covered != 1).tolist() == singles
    assert not covered[singles].any()
    costs = -(-tiles[:, 3] // 64)
    assert (np.diff(costs) <= 0).all()


def test_plan_counts_the_window_as_cost():
    """A long row that sees little comes after a short one that sees more."""
    starts, lens = (np.asarray(x, np.int32) for x in ([0, 8, 72], [4096, 190]))
    plan = plan_tiles(starts, lens, num_tokens=72, tile_q=64, tile_kv=64, window=100)
    assert np.asarray(plan.tiles)[:2, [ROW, FIRST_TOKEN, NUM_TOKENS]].tolist() == [[1, 8, 64], [0, 0, 8]]


def test_tiles_are_read_where_they_lie():
    """Tiles and their number inside one vector, as a step's inputs hold them."""
    case = Case(2, 1, 64, 16, ((10, 10), (4, 70)), 14)
    q, kv, tables, starts, lens = case.arrays()
    spec = work_spec(q, kv, tables.shape[1], interpret=INTERPRET)
    plan = spec.plan(np.asarray(starts), np.asarray(lens), case.num_tokens)
    tiles, num_tiles = plan.tiles
    vector = jnp.asarray(np.concatenate([[9] * 3, tiles.ravel(), [9] * 2, num_tiles, [9]]), jnp.int32)
    packed = TilePlan(PackedArray(vector, 3, tiles.shape), PackedArray(vector, 5 + tiles.size, (1,)))
    got = jax.jit(lambda q, kv: mosaic.attend_tiles(q, kv, tables, packed, None, case.options, spec.tuning, INTERPRET))(
        q, kv
    )
    assert worst_error(got, case.reference()) <= 2e-2


def test_layers_share_one_trace():
    """Equal shapes and options: the second call reuses the first one's trace."""
    q, kv, tables, starts, lens = SMALL.arrays()

    def layers(q):
        for window in (150, 150, None):
            q = ragged_paged_attention(
                q, kv, tables, starts, lens, scale=1.0, window=window, implementation="mosaic", interpret=INTERPRET
            )
        return q

    calls = [e.params["jaxpr"] for e in jax.make_jaxpr(layers)(q).eqns if "jaxpr" in e.params]
    assert len(calls) == 3
    assert calls[0] is calls[1]
    assert calls[0] is not calls[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 32}, "head_dim 32: the mosaic kernels take 64, 96, 128, 256"),
        ({"block_size": 8}, "block_size 8: the mosaic kernels take 16, 32, 64"),
        ({"num_heads": 17}, "17 query heads over 1 KV heads"),
        ({"dtype": "float32"}, "dtype float32: the mosaic kernels take bfloat16, float16"),
    ],
)
def test_shapes_beyond_the_kernel_are_named(changes, message):
    case = replace(SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*case.arrays(), scale=1.0, implementation="mosaic", interpret=INTERPRET)


def test_another_pool_type_is_named():
    q, kv, *rest = SMALL.arrays()
    run = partial(ragged_paged_attention, scale=1.0, implementation="mosaic", interpret=INTERPRET)
    with pytest.raises(ValueError, match="a pool of q's type bfloat16 or of float8_e4m3fn; got float16"):
        run(q, kv.astype(jnp.float16), *rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_kv": 96}, "tile_kv must be a multiple of 64; got 96"),
        ({"stages": 1}, "stages must be at least 2; got 1"),
        ({"raw_stages": 0}, "raw_stages must be at least 1; got 0"),
        ({"num_ctas": 0}, "num_ctas must be at least 1; got 0"),
    ],
)
def test_bad_tuning_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(mosaic_tuning(128), **changes)


SHARED_MEMORY = 227 * 1024
"""What a thread block on Hopper may have."""


@pytest.mark.skipif(aot_missing() is not None, reason=str(aot_missing()))
@pytest.mark.parametrize("model", GPU_MODELS)
def test_kernel_fits_the_gpu(model):
    """Compiled for an H200, 2048 tokens in up to 64 rows: no registers spilled, tensor cores and TMA used, shared
    memory within the limit."""
    shape = {"block_size": 16, "dtype": jnp.bfloat16, "has_sinks": False, "window": None, "softcap": None}
    shape |= GPU_MODELS[model]
    kv_dtype = shape.get("kv_dtype", shape["dtype"])
    dtype = jnp.float16 if "kv_dtype" in shape else shape["dtype"]
    num_tokens, num_rows, num_heads, head_dim = 2048, 64, shape["num_heads"], shape["head_dim"]
    pool = (20_000, 2, shape["num_kv_heads"], shape["block_size"], head_dim)
    options = AttentionOptions(head_dim**-0.5, shape["window"], shape["softcap"])

    def attend(q, kv, tables, tiles, num_tiles, sinks):
        plan = TilePlan(tiles, num_tiles)
        return mosaic.attend_tiles(q, kv, tables, plan, sinks, options, mosaic_tuning(head_dim))

    of = jax.ShapeDtypeStruct
    report = compile_for(
        "h200",
        attend,
        of((num_tokens, num_heads, head_dim), dtype),
        of(pool, kv_dtype),
        of((num_rows, 512), jnp.int32),
        of((max_tiles(num_tokens, num_rows, 64), 5), jnp.int32),
        of((1,), jnp.int32),
        of((num_heads,), jnp.float32) if shape["has_sinks"] else None,
    )
    (kernel,) = report.kernels
    assert kernel.uses("wgmma.mma_async")
    assert kernel.uses("cp.async.bulk.tensor")
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_MEMORY
    assert report.temp_bytes < 2**20
