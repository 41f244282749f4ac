"""Decode attention over a prefix that all rows share: the loop that reads it once, against the dense reference."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.attention_common import AttentionOptions
from octavo.pallas_kernels.paged_attention import xla
from octavo.pallas_kernels.paged_attention.config import TuningConfig
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention import xla as ragged_xla
from octavo.pallas_kernels.ragged_paged_attention.config import TuningConfig as RaggedTuningConfig
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference

TUNING = TuningConfig(rows_per_group=4, chunk_tokens=8, branch_on_partial_chunks=True, shared_chunk_tokens=16)
S, K, H, N, MAX_BLOCKS = 4, 2, 16, 6, 24
OPTIONS = AttentionOptions(scale=0.3, softcap=4.0)


def make_batch(shared_blocks: int, lens: list[int], seed: int = 0):
    """Rows whose first ``shared_blocks`` blocks are the same; NaN in every slot that nobody wrote."""
    rng = np.random.default_rng(seed)
    kv = np.full((1 + shared_blocks + sum(-(-n // S) for n in lens), 2, K, S, H), np.nan, np.float32)
    tables = np.zeros((len(lens), MAX_BLOCKS), np.int32)
    common = list(range(1, 1 + shared_blocks))
    following = 1 + shared_blocks
    for row, length in enumerate(lens):
        for index in range(-(-length // S)):
            if index < shared_blocks:
                tables[row, index] = common[index]
            else:
                tables[row, index], following = following, following + 1
            used = slice(0, min(S, length - index * S))
            block = kv[tables[row, index]]
            fresh = np.isnan(block[:, :, used])
            block[:, :, used] = np.where(fresh, rng.standard_normal(block[:, :, used].shape), block[:, :, used])
    q = rng.standard_normal((len(lens), N, H)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(kv), jnp.asarray(tables), jnp.asarray(lens, jnp.int32)


def error_of(batch, sinks=None, tuning=TUNING) -> float:
    got = np.asarray(partial(xla.attend_rows, options=OPTIONS, tuning=tuning)(*batch, sinks))
    want = np.asarray(paged_attention_reference(*batch, scale=OPTIONS.scale, softcap=OPTIONS.softcap, sinks=sinks))
    scale = np.maximum(np.abs(want).max(axis=(1, 2)), 1e-20)
    return float((np.abs(got - want).max(axis=(1, 2)) / scale).max())


CASES = {
    "long prefix, tails of all lengths": (8, [33, 34, 36, 37, 60, 90]),
    "prefix ends inside a chunk": (7, [30, 31, 45, 29]),
    "a row that ends with the prefix": (8, [32, 40, 33]),
    "all rows equal, no tails": (8, [32, 32, 32]),
    "padding rows": (8, [0, 50, 0, 41, 0]),
    "a short row limits the prefix": (8, [40, 17, 50]),
    "nothing shared": (0, [33, 20, 5, 1]),
    "one active row": (8, [50, 0, 0]),
    "no active row": (8, [0, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_prefix_agrees_with_the_reference(name):
    assert error_of(make_batch(*CASES[name])) < 1e-5


def test_sinks_are_counted_once():
    sinks = jnp.linspace(-1.0, 2.0, N)
    assert error_of(make_batch(8, [33, 40, 60, 0]), sinks) < 1e-5


RAGGED = RaggedTuningConfig(tile_q=4, chunk_tokens=8, decode=TUNING)


def ragged_error(shared_blocks: int, lens: list[int], query_lens: list[int], sinks=None) -> float:
    _, kv, tables, seq_lens = make_batch(shared_blocks, lens)
    q = jnp.asarray(np.random.default_rng(1).standard_normal((sum(query_lens) + 3, N, H)), jnp.float32)
    starts = jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32)
    args = (q, kv, tables, starts, seq_lens)
    got = np.asarray(ragged_xla.attend_tokens(*args, sinks, OPTIONS, RAGGED))
    want = np.asarray(
        ragged_paged_attention_reference(*args, scale=OPTIONS.scale, softcap=OPTIONS.softcap, sinks=sinks)
    )
    scale = np.maximum(np.abs(want).max(axis=(1, 2)), 1e-20)
    return float((np.abs(got - want).max(axis=(1, 2)) / scale).max())


RAGGED_CASES = {
    "all rows go on from a prefix": (8, [38, 41, 60], [6, 9, 20]),
    "decode rows beside them": (8, [38, 50, 41, 60, 0], [6, 1, 9, 1, 0]),
    "queries begin inside the prefix": (8, [38, 41], [20, 41]),
    "queries begin right after the prefix": (8, [34, 36, 40], [2, 4, 8]),
    "one row with several queries": (8, [38, 50, 50], [6, 1, 1]),
    "nothing shared": (0, [38, 20], [6, 9]),
}


@pytest.mark.parametrize("name", RAGGED_CASES)
def test_shared_history_agrees_with_the_reference(name):
    assert ragged_error(*RAGGED_CASES[name]) < 1e-5


def test_sinks_are_counted_once_in_mixed_batches():
    assert ragged_error(8, [38, 41, 60], [6, 9, 1], jnp.linspace(-1.0, 2.0, N)) < 1e-5


@pytest.mark.parametrize(("query_lens", "blocks"), [([6, 9], 8), ([20, 41], 0), ([6, 1], 0), ([10, 9], 4)])
def test_only_what_lies_before_all_queries_is_shared(monkeypatch, query_lens, blocks):
    seen = []
    original = ragged_xla.plan_tokens

    def spy(*args, **kwargs):
        plan = original(*args, **kwargs)
        seen.append(int(plan.num_shared_chunks) * plan.shared_blocks)
        return plan

    monkeypatch.setattr(ragged_xla, "plan_tokens", spy)
    assert ragged_error(8, [38, 41], query_lens) < 1e-5
    assert seen == [blocks]


def test_a_history_attended_twice_is_caught(monkeypatch):
    attend_twice(monkeypatch, ragged_xla)
    assert ragged_error(8, [38, 41], [6, 9]) > 1e-2


def attend_twice(monkeypatch, module) -> None:
    original = module.attend_shared_prefix

    def twice(q, kv, table, num_chunks, chunk_blocks, state, options):
        state = original(q, kv, table, num_chunks, chunk_blocks, state, options)
        return original(q, kv, table, num_chunks, chunk_blocks, state, options)

    monkeypatch.setattr(module, "attend_shared_prefix", twice)


def covered_chunks(batch) -> int:
    _, kv, tables, lens = batch
    plan = xla.plan_rows(tables, lens, block_size=kv.shape[3], window=OPTIONS.window, tuning=TUNING)
    return int(plan.num_shared_chunks)


@pytest.mark.parametrize(
    ("shared_blocks", "lens", "chunks"),
    [(8, [33, 40, 60], 2), (7, [33, 40], 1), (8, [0, 33, 40], 2), (8, [40, 17], 1), (0, [40, 40], 0), (8, [40, 0], 0)],
)
def test_the_prefix_is_found(shared_blocks, lens, chunks):
    assert covered_chunks(make_batch(shared_blocks, lens)) == chunks


def test_a_block_that_differs_in_the_middle_ends_the_prefix():
    q, kv, tables, lens = make_batch(8, [40, 40, 40])
    tables = tables.at[1, 5].set(tables[1, 9])
    assert covered_chunks((q, kv, tables, lens)) == 1
    assert error_of((q, kv, tables, lens)) < 1e-5


def test_a_prefix_attended_twice_is_caught(monkeypatch):
    batch = make_batch(8, [33, 40, 60])
    attend_twice(monkeypatch, xla)
    assert error_of(batch) > 1e-2


def test_padding_rows_give_zeros():
    got = np.asarray(xla.attend_rows(*make_batch(8, [0, 50, 41]), None, OPTIONS, TUNING))
    assert not got[0].any()
    assert got[1].any()
