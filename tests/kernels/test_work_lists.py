"""Work planned on the host for whole steps: in NumPy as in JAX, once for each window, in one vector, and quickly."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.dispatch import AttentionShape
from octavo.pallas_kernels.packed_array import PackedArray
from octavo.pallas_kernels.work_lists import WorkListSpec

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
MAX_BLOCKS = 64
RNG = np.random.default_rng(0)


def lengths(query_lens: list[int], longest: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """query_start_loc and seq_lens: some history before the queries; rows without queries have length 0."""
    counts = np.asarray(query_lens)
    lens = np.where(counts > 0, counts + RNG.integers(0, longest, len(counts)), 0)
    return np.cumsum([0, *query_lens]).astype(np.int32), lens.astype(np.int32)


MIXED = {
    "nothing": [0, 0, 0],
    "decode rows": [1, 1, 0, 1],
    "prefill": [40, 0, 0],
    "a chunk among decode rows": [1, 1, 30, 1, 0, 0],
    **{f"random {i}": RNG.choice([0, 1, 1, 2, 7, 20], size=9).tolist() for i in range(4)},
}


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("name", MIXED)
def test_numpy_plans_as_jax_does(name, window):
    starts, lens = lengths(MIXED[name])
    num_tokens = int(starts[-1]) + 5
    (spec,) = WorkListSpec.of(SHAPE, MAX_BLOCKS, [window]).specs
    on_host = spec.plan(starts, lens, num_tokens)
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.int32 for leaf in jax.tree.leaves(on_host))
    in_graph = jax.jit(spec.plan, static_argnums=2)(jnp.asarray(starts), jnp.asarray(lens), num_tokens)
    used = int(on_host.tiles.num_tiles[0])
    assert used == int(in_graph.tiles.num_tiles[0]) > 0
    np.testing.assert_array_equal(on_host.tiles.tiles[:used], in_graph.tiles.tiles[:used])
    jax.tree.map(np.testing.assert_array_equal, on_host.singles, in_graph.singles)
    np.testing.assert_array_equal(on_host.single_tokens, in_graph.single_tokens)
    assert on_host.single_tokens.tolist() == [
        start if count == 1 else num_tokens for start, count in zip(starts, MIXED[name], strict=False)
    ]


def packed(spec: WorkListSpec, starts, lens, num_tokens: int, decode_only: bool) -> dict[str, PackedArray]:
    """The fields of a step as they lie in a vector that held something else before."""
    inputs = {"query_start_loc": starts, "seq_lens": lens}
    shapes = spec.fields(num_tokens, len(lens), decode_only)
    vector, fields = np.full(100_000, -7, np.int32), {}
    at = 13
    for name, shape in shapes.items():
        fields[name] = PackedArray(vector, at, shape)
        at += int(np.prod(shape)) + 3
    spec.fill(inputs | {name: field.unpack() for name, field in fields.items()}, num_tokens, decode_only)
    written = np.zeros(len(vector), bool)
    for field in fields.values():
        written[field.start : field.start + field.unpack().size] = True
    assert (vector[~written] == -7).all()
    return fields


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_carries_one_plan_for_each_window(decode_only):
    starts, lens = lengths([1] * 6 if decode_only else [1, 20, 0, 1, 9, 1])
    num_tokens = 6 if decode_only else 40
    spec = WorkListSpec.of(SHAPE, MAX_BLOCKS, [100, None, 100, None])
    assert spec.windows == (100, None)
    plans = spec.plans(packed(spec, starts, lens, num_tokens, decode_only), decode_only)
    for plan, part in zip(plans, spec.specs, strict=True):
        want = part.decode.plan(lens) if decode_only else part.plan(starts, lens, num_tokens)
        leaves = jax.tree.leaves(plan, is_leaf=lambda leaf: isinstance(leaf, PackedArray))
        for found, expected in zip(leaves, jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(PackedArray.of(found).unpack(), expected)
    first, second = (jax.tree.leaves(plan)[0] for plan in (part.decode.plan(lens) for part in spec.specs))
    assert not np.array_equal(first, second), "the windows make no difference here"


def test_padding_rows_get_no_work():
    spec = WorkListSpec.of(SHAPE, MAX_BLOCKS, [None])
    lens = np.asarray([300, 0, 0, 5, 0], np.int32)
    fields = packed(spec, np.arange(6, dtype=np.int32), lens, 5, True)
    assert np.diff(fields["row_items_0"].unpack()).astype(bool).tolist() == [True, False, False, True, False]
    items = fields["work_items_0"].unpack()
    assert set(items[items[:, 2] > 0, 0].tolist()) == {0, 3}


def test_256_decode_rows_are_planned_in_no_time():
    """0.15 ms, of a step that takes several: five times what it takes."""
    spec = WorkListSpec.of(AttentionShape(32, 8, 128, 16, "bfloat16"), 512, [None])
    starts, lens = lengths([1] * 256, longest=4096)
    views = {"query_start_loc": starts, "seq_lens": lens}
    views |= {name: np.zeros(shape, np.int32) for name, shape in spec.fields(256, 256, True).items()}
    seconds = []
    for _ in range(50):
        started = time.perf_counter()
        spec.fill(views, 256, True)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.15e-3
