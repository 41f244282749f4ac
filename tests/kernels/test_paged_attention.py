"""Both attention operations against the dense reference, in every implementation."""

from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels import attention_common
from octavo.pallas_kernels.attention_common import AttentionOptions
from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.paged_attention import xla as decode_xla
from octavo.pallas_kernels.paged_attention.config import CPU_TUNING as DECODE_TUNING
from octavo.pallas_kernels.paged_attention.config import GPU_TUNING as GPU_DECODE_TUNING
from octavo.pallas_kernels.paged_attention.reference import paged_attention_reference
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention import xla as ragged_xla
from octavo.pallas_kernels.ragged_paged_attention.config import CPU_TUNING as RAGGED_TUNING
from octavo.pallas_kernels.ragged_paged_attention.config import GPU_TUNING as GPU_RAGGED_TUNING
from octavo.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference

IMPLEMENTATIONS = ["xla"]
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
OPTION_NAMES = ("scale", "window", "softcap")
MAX_TOKENS = 192
NUM_TOKENS = 128
"""T of the mixed calls; the last ones are padding."""


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int = 32
    options: dict = field(default_factory=dict, hash=False)
    has_sinks: bool = False
    dtype: type = jnp.float32

    @property
    def kwargs(self) -> dict:
        sinks = jnp.linspace(-2.0, 3.0, self.num_heads) if self.has_sinks else None
        return {"scale": self.head_dim**-0.5, "sinks": sinks, **self.options}

    @property
    def lens(self) -> list[int]:
        """Two groups of rows, in no order; with the mixed call's query lengths below."""
        s = self.block_size
        return [0, 1, s - 1, s, s + 1, 70, 192, 65, 64, 63, 1, 0, 3 * s, 3 * s + 1, 130, 2, 100, 191, s + 2, 33]

    @property
    def query_lens(self) -> list[int]:
        """Nothing, one token, all the row's tokens, or a chunk after some history."""
        return [0, 1, 2, 1, 2, 66, 1, 1, 0, 3, 1, 0, 2, 3, 7, 2, 1, 1, 2, 1]


CASES = {
    "group 1": Case(3, 3, 4),
    "smollm2, group 3": Case(9, 3, 16, head_dim=64),
    "window, group 4": Case(8, 2, 4, options={"window": 7}),
    "softcap, group 7": Case(14, 2, 16, options={"softcap": 1.5}),
    "sinks, group 8": Case(8, 1, 16, has_sinks=True),
    "all options, long window": Case(4, 2, 4, options={"window": 66, "softcap": 2.0}, has_sinks=True),
    "bfloat16": Case(9, 3, 16, dtype=jnp.bfloat16),
}


@dataclass(frozen=True)
class Batch:
    q: jax.Array
    mixed_q: jax.Array
    kv: jax.Array
    tables: jax.Array
    lens: jax.Array
    query_start_loc: jax.Array

    def args(self, op: str) -> tuple[jax.Array, ...]:
        if op == "decode":
            return self.q, self.kv, self.tables, self.lens
        return self.mixed_q, self.kv, self.tables, self.query_start_loc, self.lens


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Blocks in random order, the first block of one row shared by another, NaN wherever nothing was written."""
    rng = np.random.default_rng(seed)
    size, max_blocks = case.block_size, MAX_TOKENS // case.block_size
    num_blocks = 1 + sum(-(-n // size) for n in case.lens) + 5
    kv = np.full((num_blocks, 2, case.num_kv_heads, size, case.head_dim), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(case.lens), max_blocks), np.int32)
    for row, length in enumerate(case.lens):
        for index in range(-(-length // size)):
            block = tables[row, index] = tables[5, 0] if (row, index) == (6, 0) else free.pop()
            used = min(size, length - index * size)
            kv[block, :, :, :used] = rng.standard_normal((2, case.num_kv_heads, used, case.head_dim))
    tables[17, 3] = tables[17, 1]  # a repeated block
    q = rng.standard_normal((len(case.lens), case.num_heads, case.head_dim))
    mixed_q = rng.standard_normal((NUM_TOKENS, case.num_heads, case.head_dim))
    assert sum(case.query_lens) < NUM_TOKENS
    return Batch(
        q=jnp.asarray(q, case.dtype),
        mixed_q=jnp.asarray(mixed_q, case.dtype),
        kv=jnp.asarray(kv, case.dtype),
        tables=jnp.asarray(tables),
        lens=jnp.asarray(case.lens, jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *case.query_lens]), jnp.int32),
    )


PUBLIC = {"decode": paged_attention, "mixed": ragged_paged_attention}
REFERENCE = {
    "decode": jax.jit(paged_attention_reference, static_argnames=OPTION_NAMES),
    "mixed": jax.jit(ragged_paged_attention_reference, static_argnames=OPTION_NAMES),
}


@cache
def expected(op: str, name: str) -> np.ndarray:
    return np.asarray(REFERENCE[op](*make_batch(CASES[name]).args(op), **CASES[name].kwargs), np.float32)


def worst_row_error(got: jax.Array, want: np.ndarray) -> float:
    """Largest difference in a row over the row's largest value, NaN counting as infinite."""
    difference = np.abs(np.asarray(got, np.float32) - want).max(axis=(1, 2))
    error = difference / np.maximum(np.abs(want).max(axis=(1, 2)), 1e-20)
    return float(np.where(np.isnan(error), np.inf, error).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["decode", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name, op, implementation):
    case, batch = CASES[name], make_batch(CASES[name])
    got = PUBLIC[op](*batch.args(op), **case.kwargs, implementation=implementation)
    want = expected(op, name)
    assert got.dtype == case.dtype
    assert np.isfinite(want).all()
    assert worst_row_error(got, want) <= TOLERANCE[case.dtype]


def test_reference_agrees_with_a_loop_over_queries():
    """The reference itself, against the definition in numpy float64."""
    case = CASES["all options, long window"]
    batch, kwargs = make_batch(case), case.kwargs
    q, kv = np.asarray(batch.mixed_q, np.float64), np.asarray(batch.kv, np.float64)
    want = np.zeros(q.shape)
    for row, (length, query_len) in enumerate(zip(case.lens, case.query_lens, strict=True)):
        blocks = kv[np.asarray(batch.tables)[row]].transpose(1, 2, 0, 3, 4)
        keys, values = blocks.reshape(2, case.num_kv_heads, -1, case.head_dim)
        for i in range(query_len):
            token, pos = int(batch.query_start_loc[row]) + i, length - query_len + i
            first = max(0, pos - kwargs["window"] + 1)
            for head in range(case.num_heads):
                kv_head = head // (case.num_heads // case.num_kv_heads)
                scores = keys[kv_head, first : pos + 1] @ q[token, head] * kwargs["scale"]
                weights = np.exp(kwargs["softcap"] * np.tanh(scores / kwargs["softcap"]))
                total = weights.sum() + np.exp(float(kwargs["sinks"][head]))
                want[token, head] = weights @ values[kv_head, first : pos + 1] / total
    assert worst_row_error(expected("mixed", "all options, long window"), want.astype(np.float32)) <= 1e-5


@pytest.mark.parametrize("op", ["decode", "mixed"])
def test_gpu_tuning_agrees_with_reference(op):
    """What a GPU would run: other tile sizes and no branch in the loop."""
    name = "all options, long window"
    run = {
        "decode": partial(decode_xla.attend_rows, tuning=GPU_DECODE_TUNING),
        "mixed": partial(ragged_xla.attend_tokens, tuning=GPU_RAGGED_TUNING),
    }[op]
    assert worst_row_error(run_uncached(run, op, name), expected(op, name)) <= 1e-5


def run_uncached(run, op: str, name: str, **changes) -> jax.Array:
    """An implementation traced afresh, so that what a test patched in it takes effect."""
    kwargs = {**CASES[name].kwargs, **changes}
    options = AttentionOptions(kwargs["scale"], kwargs.get("window"), kwargs.get("softcap"))
    return jax.jit(partial(run, options=options))(*make_batch(CASES[name]).args(op), kwargs["sinks"])


def swap_keys_and_values(monkeypatch, module):
    original = module.gather_chunk
    monkeypatch.setattr(module, "gather_chunk", lambda *args: original(*args)[::-1])


def drop_the_mask(monkeypatch, module):
    monkeypatch.setattr(module, "MASK_VALUE", 0.0)


def leave_unwritten_values(monkeypatch, module):
    original = module.gather_chunk
    monkeypatch.setattr(
        module, "gather_chunk", lambda kv, ids, written, branch: original(kv, ids, jnp.ones_like(written), branch)
    )


def forget_to_rescale(monkeypatch, module):
    original = attention_common.SoftmaxState.update

    def update(self, scores, v, precision):
        new = original(self, scores, v, precision)
        lost = 1 - jnp.exp(self.maximum - new.maximum)
        return new._replace(accumulator=new.accumulator + self.accumulator * lost[..., None])

    monkeypatch.setattr(attention_common.SoftmaxState, "update", update)


MUTATIONS = [swap_keys_and_values, drop_the_mask, leave_unwritten_values, forget_to_rescale]


@pytest.mark.parametrize("op", ["decode", "mixed"])
@pytest.mark.parametrize("mutate", [None, *MUTATIONS])
def test_mutations_are_caught(mutate, op, monkeypatch):
    module, run = {
        "decode": (decode_xla, partial(decode_xla.attend_rows, tuning=DECODE_TUNING)),
        "mixed": (ragged_xla, partial(ragged_xla.attend_tokens, tuning=RAGGED_TUNING)),
    }[op]
    if mutate:
        mutate(monkeypatch, module)
    error = worst_row_error(run_uncached(run, op, "group 1"), expected(op, "group 1"))
    assert error <= 1e-5 if mutate is None else error > 1e-2


@pytest.mark.parametrize("op", ["decode", "mixed"])
@pytest.mark.parametrize("window", [6, 8])
def test_window_off_by_one_is_caught(window, op):
    case, batch = CASES["window, group 4"], make_batch(CASES["window, group 4"])
    got = PUBLIC[op](*batch.args(op), **{**case.kwargs, "window": window})
    assert worst_row_error(got, expected(op, "window, group 4")) > 1e-2


@pytest.mark.parametrize("op", ["decode", "mixed"])
def test_a_row_is_the_same_in_any_batch(op):
    """Bit for bit, within one compiled shape: other rows change neither the order nor the terms of its sums."""
    case, batch = CASES["smollm2, group 3"], make_batch(CASES["smollm2, group 3"])
    together = np.asarray(PUBLIC[op](*batch.args(op), **case.kwargs))
    for row in (4, 13, 19):
        start, end = (row, row + 1) if op == "decode" else map(int, batch.query_start_loc[row : row + 2])
        alone = list(batch.args(op))
        alone[-1] = jnp.zeros_like(batch.lens).at[row].set(batch.lens[row])
        if op == "mixed":
            counts = np.where(np.arange(len(case.lens)) == row, case.query_lens, 0)
            alone[0] = jnp.zeros_like(batch.mixed_q).at[: end - start].set(batch.mixed_q[start:end])
            alone[3] = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        got = np.asarray(PUBLIC[op](*alone, **case.kwargs))
        where = slice(start, end) if op == "decode" else slice(0, end - start)
        np.testing.assert_array_equal(got[where], together[start:end])
        assert not np.delete(got, where, axis=0).any()
