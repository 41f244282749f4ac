"""The Mosaic decode kernel on a CPU: interpreted with race detection, against the dense reference."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import PagedBatch, make_paged_batch, worst_error

from octavo.pallas_kernels.attention_common import AttentionOptions
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import load_mosaic
from octavo.pallas_kernels.packed_array import PackedArray
from octavo.pallas_kernels.paged_attention import paged_attention, work_spec
from octavo.pallas_kernels.paged_attention.config import mosaic_tuning
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.paged_attention.work import WorkPlan, plan_work

if reason := mosaic_missing():
    pytest.skip(reason, allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

mosaic = load_mosaic("paged_attention")
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
"""Memory that nothing wrote is NaN in the interpreter, outputs included."""
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    lens: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"
    scale: float = 0.2
    kv_dtype: str | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def batch(self) -> PagedBatch:
        return make_paged_batch(
            self.lens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=jnp.dtype(self.dtype),
            window=self.window,
            kv_dtype=jnp.dtype(self.kv_dtype or self.dtype),
        )

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.scale, self.window, self.softcap)

    @property
    def sinks(self) -> jax.Array | None:
        return jnp.linspace(-1.0, 4.0, self.num_heads) if self.has_sinks else None

    @property
    def kwargs(self) -> dict:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    def reference(self) -> np.ndarray:
        """In float32, on the keys and values that the pool stands for."""
        batch, (k_scale, v_scale) = self.batch(), self.kv_scales
        kv = batch.kv.astype(jnp.float32) * jnp.asarray([k_scale, v_scale]).reshape(1, 2, 1, 1, 1)
        q = batch.q.astype(jnp.float32)
        return np.asarray(paged_attention_reference(q, kv, batch.tables, batch.lens, **self.kwargs))


CASES = {
    "group 4, lengths": Case(8, 2, 64, 16, (0, 1, 15, 16, 17, 0, 150)),
    "group 1, float16": Case(2, 2, 96, 32, (33, 96), dtype="float16"),
    "group 7, window": Case(7, 1, 128, 16, (3, 40, 330), window=290),
    "group 8, softcap": Case(8, 1, 64, 64, (64, 65), softcap=1.5),
    "group 2, window, softcap": Case(4, 2, 256, 16, (70, 20), window=40, softcap=3.0),
    "group 16, sinks": Case(16, 1, 64, 32, (0, 31, 140), has_sinks=True),
    "float8, scales": Case(
        4, 1, 128, 16, (0, 1, 200), window=190, softcap=2.0, kv_dtype="float8_e4m3fn", kv_scales=(0.4, 3.0)
    ),
}


def interpreted(run, *args, **kwargs):
    """The finished result: other work of JAX beside a running interpreter, which calls back into Python, can wait for
    it and it for that, for ever."""
    return jax.block_until_ready(run(*args, **kwargs))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name):
    """Lengths about the block size, items of one and several tiles, permuted, shared and repeated blocks, NaN in
    every slot that no row sees."""
    case = CASES[name]
    got = interpreted(
        paged_attention,
        *case.batch().arrays,
        **case.kwargs,
        kv_scales=jnp.asarray(case.kv_scales) if case.kv_dtype else None,
        implementation="mosaic",
        interpret=INTERPRET,
    )
    assert got.dtype == jnp.dtype(case.dtype)
    assert worst_error(got, case.reference()) <= TOLERANCE[case.dtype]
    empty = np.asarray(case.lens) == 0
    assert not np.asarray(got)[empty].any()


SMALL = Case(4, 1, 64, 16, (5, 420), window=350)
"""One KV head, two rows, the second in two items of three tiles, one more than there are stages."""


def run_small(case: Case = SMALL, batch: PagedBatch | None = None, **changes) -> tuple[float, jax.Array]:
    """The kernel traced afresh, so that what a test patched in it takes effect: (worst error, result)."""
    batch = batch or case.batch()
    options = AttentionOptions(**{"scale": case.scale, "window": case.window, **changes})
    spec = work_spec(batch.q, batch.kv, batch.tables.shape[1], window=options.window, interpret=INTERPRET)
    run = partial(mosaic.paged_attention_mosaic, options=options, tuning=spec.tuning, interpret=INTERPRET)
    work = spec.plan(np.asarray(batch.lens))
    got = interpreted(jax.jit(run), batch.q, batch.kv, batch.tables, work, case.sinks)
    return worst_error(got, case.reference()), got


def drop_the_mask(monkeypatch):
    monkeypatch.setattr(mosaic, "_mask", lambda logits, first, end: logits)


def leave_unseen_values(monkeypatch):
    monkeypatch.setattr(mosaic, "_zero_unseen_rows", lambda v_s, columns, first, end: None)


def forget_to_rescale(monkeypatch):
    original = mosaic._softmax_step

    def step(state, logits):
        new, probs = original(state, logits)
        return new._replace(accumulator=state.accumulator), probs

    monkeypatch.setattr(mosaic, "_softmax_step", step)


def merge_without_weights(monkeypatch):
    original = mosaic.attend_items

    def attend(*args):
        partials, logsumexps = original(*args)
        return partials, jnp.zeros_like(logsumexps)

    monkeypatch.setattr(mosaic, "attend_items", attend)


MUTATIONS = [None, drop_the_mask, leave_unseen_values, forget_to_rescale, merge_without_weights]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutations_are_caught(mutate, monkeypatch):
    if mutate:
        mutate(monkeypatch)
    error, _ = run_small()
    assert error <= 2e-2 if mutate is None else error > 5e-2


def test_blocks_that_no_row_sees_are_not_read(monkeypatch):
    """Rows of whole blocks that end, and with the window begin, inside a tile. Without the zeroing of unseen values
    the NaN of any other block would show."""
    leave_unseen_values(monkeypatch)
    assert run_small(replace(SMALL, lens=(16, 0, 416), window=336))[0] <= 2e-2


def test_swapped_keys_and_values_are_caught():
    batch = SMALL.batch()
    assert run_small(batch=replace(batch, kv=batch.kv[:, ::-1]))[0] > 5e-2


@pytest.mark.parametrize("window", [349, 351])
def test_window_off_by_one_is_caught(window):
    """One key too few changes the result; one too many is NaN here, and must show."""
    assert run_small(window=window)[0] > 2e-2


def test_partials_are_exact_to_the_probabilities_rounding():
    """Each item against its own keys: the logsumexp is float32 throughout, the result differs by the rounding of the
    probabilities to bfloat16. Rows of one tile or less come out of one item, padding items are not written."""
    case = Case(4, 2, 64, 16, (0, 40, 150))
    batch, tuning = case.batch(), mosaic_tuning(64, interpreted=True)
    work = plan_work(np.asarray(batch.lens), num_items=6, block_size=16, tile_kv=64, min_keys=64, window=None)
    run = partial(mosaic.attend_items, options=case.options, tuning=tuning, interpret=INTERPRET)
    partials, logsumexps = map(np.asarray, interpreted(jax.jit(run), batch.q, batch.kv, batch.tables, work))
    items = np.asarray(work.items)
    assert [tuple(item) for item in items] == [(1, 0, 40, 0), (2, 0, 64, 0), (2, 64, 128, 64), (2, 128, 150, 128)] + [
        (0, 0, 0, 0)
    ] * 2
    for index, (row, first, end, _) in enumerate(items[:4]):
        blocks = np.asarray(batch.kv, np.float64)[np.asarray(batch.tables)[row, first // 16 : -(-end // 16)]]
        keys, values = np.moveaxis(blocks, 0, 2).reshape(2, 2, -1, 64)[:, :, : end - first]
        q = np.asarray(batch.q, np.float64)[row].reshape(2, 2, 64)
        logits = np.einsum("kgh,kch->kgc", q, keys) * case.scale
        logsumexp = np.log(np.exp(logits).sum(-1))
        want = np.einsum("kgc,kch->kgh", np.exp(logits - logsumexp[..., None]), values)
        np.testing.assert_allclose(logsumexps[index, :, :2] * np.log(2), logsumexp, rtol=2e-6, atol=2e-6)
        assert worst_error(partials[index, :, :2, :64], want) <= 4e-3
    assert np.isnan(partials[4:]).all()
    assert np.isnan(logsumexps[4:]).all()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_combine_is_exact(has_sinks):
    """Float32 partials of up to three items a row, merged by their weights; an empty row gives zeros."""
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((5, 1, 8, 128)).astype(np.float32)
    logsumexps = (5 * rng.standard_normal((5, 1, 64))).astype(np.float32)
    sinks = np.asarray([0.5, -3.0], np.float32)
    work = WorkPlan(jnp.zeros((5, 4), jnp.int32), jnp.asarray([0, 3, 3, 4], jnp.int32))
    run = partial(mosaic.combine_items, shape=(3, 2, 96), dtype=jnp.float32, interpret=INTERPRET)
    got = interpreted(jax.jit(run), partials, logsumexps, work, sinks if has_sinks else None)
    want = np.zeros((3, 2, 96))
    for row, first, end in ((0, 0, 3), (2, 3, 4)):
        weights = np.exp2(logsumexps[first:end, 0, :2].astype(np.float64))
        total = weights.sum(0) + (np.exp(sinks) if has_sinks else 0.0)
        want[row] = (weights[..., None] * partials[first:end, 0, :2, :96]).sum(0) / total[:, None]
    assert worst_error(got, want) <= 1e-5


def test_lists_are_read_where_they_lie():
    """Both lists inside one vector, as a step's inputs hold them."""
    case = Case(4, 1, 64, 16, (5, 0, 150))
    batch = case.batch()
    spec = work_spec(batch.q, batch.kv, batch.tables.shape[1], interpret=INTERPRET)
    plan = spec.plan(np.asarray(batch.lens))
    vector = jnp.asarray(np.concatenate([[9] * 3, plan.items.ravel(), [9] * 2, plan.row_items, [9]]), jnp.int32)
    items = PackedArray(vector, 3, plan.items.shape)
    work = WorkPlan(items, PackedArray(vector, 5 + plan.items.size, plan.row_items.shape))
    run = partial(paged_attention, **case.kwargs, implementation="mosaic", interpret=INTERPRET)
    got = interpreted(run, *batch.arrays, work=work)
    assert worst_error(got, case.reference()) <= 2e-2


def test_layers_share_one_trace():
    """Equal shapes and options: the second call reuses the first one's trace."""
    batch = SMALL.batch()

    def layers(q, kv, tables, lens):
        for window in (350, 350, None):
            q = paged_attention(
                q, kv, tables, lens, scale=1.0, window=window, implementation="mosaic", interpret=INTERPRET
            )
        return q

    calls = [e.params["jaxpr"] for e in jax.make_jaxpr(layers)(*batch.arrays).eqns if "jaxpr" in e.params]
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
        paged_attention(*case.batch().arrays, **case.kwargs, implementation="mosaic", interpret=INTERPRET)


def test_pool_types_beyond_the_kernel_are_named():
    case = replace(SMALL, kv_dtype="float8_e5m2")
    with pytest.raises(ValueError, match="a pool of q's type bfloat16 or of float8_e4m3fn; got float8_e5m2"):
        paged_attention(*case.batch().arrays, **case.kwargs, implementation="mosaic", interpret=INTERPRET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_kv": 96}, "tile_kv must be a multiple of 64; got 96"),
        ({"stages": 1}, "stages must be at least 2; got 1"),
        ({"min_keys_per_item": 32}, "min_keys_per_item must be a multiple of tile_kv 64; got 32"),
        ({"target_thread_blocks": 0}, "target_thread_blocks must be at least 1; got 0"),
    ],
)
def test_bad_tuning_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(mosaic_tuning(128), **changes)
