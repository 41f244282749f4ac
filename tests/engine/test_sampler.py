"""The whole sampler: invariance, randomness, penalties and masks, log-probabilities, padding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.sampler import RowState, SamplerOutput, SamplingInputs, prompt_logprobs, sample
from octavo.engine.sampler_search import DEPTH

VOCAB = 2503
WIDTH = 2528
MAX_ROWS = 20
ROWS = 16
WORDS = -(-WIDTH // 32)

DEFAULTS: dict[str, tuple[Any, Any]] = {
    "temperature": (1.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "choice": (0, np.int32),
    "position": (0, np.int32),
    "num_logprobs": (-1, np.int32),
    "suppress_stop": (False, np.bool_),
    "use_bias": (False, np.bool_),
    "use_mask": (False, np.bool_),
}


def make_inputs(rows: int = ROWS, seeds: list[int] | None = None, **options: Any) -> SamplingInputs:
    """SamplingInputs with one value or a list of values per option."""
    words = [(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) for seed in seeds or range(rows)]
    fields = {
        name: jnp.asarray(np.broadcast_to(np.asarray(options.pop(name, default), dtype), (rows,)))
        for name, (default, dtype) in DEFAULTS.items()
    }
    assert not options, options
    return SamplingInputs(seed=jnp.asarray(np.array(words, np.uint32)), **fields)


def make_state() -> dict[str, np.ndarray]:
    return {
        "output_counts": np.zeros((MAX_ROWS, WIDTH), np.int32),
        "prompt_mask": np.zeros((MAX_ROWS, WIDTH), bool),
        "bias_ids": np.full((MAX_ROWS, 300), WIDTH, np.int32),
        "bias_values": np.zeros((MAX_ROWS, 300), np.float32),
        "stop_ids": np.full((MAX_ROWS, 128), WIDTH, np.int32),
    }


def make_logits(rows: int = ROWS, scale: float = 2.5) -> np.ndarray:
    """f32[rows, WIDTH]; the padding of the head is larger than any real logit."""
    logits = np.random.default_rng(3).normal(size=(rows, WIDTH)).astype(np.float32) * np.float32(scale)
    logits[:, VOCAB:] = 99.0
    return logits


compiled = jax.jit(sample, static_argnames="vocab_size")


def run(
    logits: np.ndarray,
    inputs: SamplingInputs,
    state: dict[str, np.ndarray] | None = None,
    rows: np.ndarray | None = None,
    allow_mask: np.ndarray | None = None,
) -> SamplerOutput:
    """Samples and brings the result to the host."""
    count = len(logits)
    result = compiled(
        jnp.asarray(logits),
        inputs,
        RowState(**jax.tree.map(jnp.asarray, state or make_state())),
        jnp.asarray(np.arange(count, dtype=np.int32) if rows is None else rows),
        jnp.asarray(np.full((count, WORDS), -1, np.int32) if allow_mask is None else allow_mask),
        vocab_size=VOCAB,
    )
    return jax.tree.map(np.asarray, result)


def mixed_batch() -> tuple[np.ndarray, SamplingInputs, dict[str, np.ndarray], np.ndarray]:
    """16 rows that use everything between them."""
    rng = np.random.default_rng(8)
    inputs = make_inputs(
        seeds=[-1, 0, 2**32, 2**63 - 1, *range(12)],
        temperature=[0.0, 1.0, 0.7, 2.0, 1.0, 0.0, 1.3, 1.0, 1.0, 1e-5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0],
        top_k=[0, 50, 0, 1000, 1, 5, 50, 0, 0, 0, 0, 64, 0, 0, 50, 0],
        top_p=[1.0, 0.9, 0.9, 0.8, 1.0, 0.5, 1.0, 1.0, 0.1, 1.0, 0.95, 1.0, 1.0, 1.0, 0.9, 1.0],
        min_p=[0, 0, 0, 0.01, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0.02, 0],
        repetition_penalty=[1, 1, 1.2, 1, 1, 1.1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        presence_penalty=[0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        frequency_penalty=[0, 0.3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        choice=[0, 1, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        position=rng.integers(0, 4000, ROWS),
        num_logprobs=[-1, 0, 5, 20, *[-1] * 12],
        use_bias=[i == 6 for i in range(ROWS)],
        suppress_stop=[i == 0 for i in range(ROWS)],
        use_mask=[i == 10 for i in range(ROWS)],
    )
    state = make_state()
    state["output_counts"][:, rng.integers(0, VOCAB, 50)] = 2
    state["prompt_mask"][:, rng.integers(0, VOCAB, 50)] = True
    state["bias_ids"][:, :3], state["bias_values"][:, :3] = [5, 7, 9], [3.0, -100.0, 2.0]
    state["stop_ids"][:, :2] = [1, 2]
    mask = rng.integers(-(2**31), 2**31, (ROWS, WORDS), dtype=np.int64).astype(np.int32)
    return make_logits(), inputs, state, mask


def take(tree: Any, index: np.ndarray) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def whole() -> SamplerOutput:
    logits, inputs, state, mask = mixed_batch()
    return run(logits, replace(inputs, num_logprobs=jnp.full(ROWS, 5, jnp.int32)), state, None, mask)


@pytest.mark.parametrize("size", [1, 3])
def test_a_row_does_not_depend_on_its_batch(whole: SamplerOutput, size: int) -> None:
    logits, inputs, state, mask = mixed_batch()
    inputs = replace(inputs, num_logprobs=jnp.full(ROWS, 5, jnp.int32))
    for start in range(0, ROWS - size + 1, size):
        index = np.arange(start, start + size)[::-1].copy()
        part = run(logits[index], take(inputs, index), state, index.astype(np.int32), mask[index])
        assert_same(part, take(whole, index))


def test_the_same_call_gives_the_same_result(whole: SamplerOutput) -> None:
    logits, inputs, state, mask = mixed_batch()
    inputs = replace(inputs, num_logprobs=jnp.full(ROWS, 5, jnp.int32))
    assert_same(run(logits, inputs, state, None, mask), whole)
    other = run(logits, replace(inputs, position=inputs.position + 1), state, None, mask)
    assert (other.token_ids != whole.token_ids).any()


def test_padding_rows_enter_no_branch_and_change_nothing(whole: SamplerOutput) -> None:
    """Rows outside of the state, with every option 0 as the host pads them."""
    logits, inputs, state, mask = mixed_batch()
    zeros = jax.tree.map(jnp.zeros_like, inputs)
    padded = jax.tree.map(lambda a, b: jnp.concatenate([a[:8], b[8:]]), inputs, zeros)
    rows = np.array([*range(8), *[MAX_ROWS] * 8], np.int32)
    found = run(logits, padded, state, rows, mask)
    np.testing.assert_array_equal(found.token_ids[:8], whole.token_ids[:8])
    assert (found.token_ids < VOCAB).all()
    nothing = run(logits, zeros, state, np.full(ROWS, MAX_ROWS, np.int32), mask)
    np.testing.assert_array_equal(nothing.token_ids, logits[:, :VOCAB].argmax(1))
    assert not nothing.top_ids.any(), "padding must not ask for log-probabilities"


def test_greedy_takes_the_first_of_equals_also_beside_sampled_rows() -> None:
    logits = make_logits()
    logits[0, [7, 2000, 30]] = 60.0
    logits[1, :VOCAB] = -3.0
    expected = logits[:, :VOCAB].argmax(1)
    np.testing.assert_array_equal(run(logits, make_inputs(temperature=0.0)).token_ids, expected)
    beside = run(logits, make_inputs(temperature=[0.0] * 8 + [2.0] * 8, top_k=[3] * 8 + [0] * 8)).token_ids
    np.testing.assert_array_equal(beside[:8], expected[:8])
    assert (beside[8:] != expected[8:]).any()


@pytest.mark.parametrize("temperature", [5e-324, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits()
    found = run(logits, make_inputs(temperature=temperature)).token_ids
    np.testing.assert_array_equal(found, logits[:, :VOCAB].argmax(1))


def test_every_bit_of_the_seed_counts_and_choice_and_position_too() -> None:
    def draw(seeds: list[int], **options: Any) -> np.ndarray:
        logits = np.broadcast_to(make_logits(1, 1.0), (ROWS, WIDTH)).copy()
        return run(logits, make_inputs(seeds=seeds, **options)).token_ids

    seeds = [-1, 0, 2**32, 2**63 - 1, -(2**63), 1, 2, 3, 1 << 31, 1 << 33, 1 << 40, 1 << 62, 4, 5, 6, 7]
    alone = draw(seeds)
    assert len(set(alone.tolist())) >= 14
    np.testing.assert_array_equal(draw(seeds[::-1]), alone[::-1])
    assert len(set(draw([1] * ROWS, choice=range(ROWS)).tolist())) >= 14
    assert len(set(draw([1] * ROWS, position=range(ROWS)).tolist())) >= 14
    assert set(draw([1] * ROWS)) == {alone[5]}


def penalised(row: np.ndarray, prompt: np.ndarray, counts: np.ndarray, penalties: tuple[float, float, float]) -> Any:
    repetition, presence, frequency = penalties
    x = row.astype(np.float64)
    seen = prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


def test_penalties_count_prompt_and_output_as_vllm_does() -> None:
    """Read through argmax: each row's best token changes as the formula says."""
    rng = np.random.default_rng(1)
    logits = make_logits()
    state = make_state()
    order = np.argsort(-logits[:, :VOCAB], axis=1)
    for row in range(ROWS):
        state["prompt_mask"][row, order[row, rng.integers(0, 8, 4)]] = True
        state["output_counts"][row, order[row, rng.integers(0, 8, 4)]] = rng.integers(1, 4, 4)
    options = [(1.3, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 1.0), (0.8, -1.0, 0.5)] * 4
    columns = dict(
        zip(("repetition_penalty", "presence_penalty", "frequency_penalty"), zip(*options, strict=True), strict=True)
    )
    found = run(logits, make_inputs(temperature=0.0, **columns), state).token_ids

    def expect(prompt: np.ndarray, counts: np.ndarray) -> np.ndarray:
        rows = [
            penalised(logits[i, :VOCAB], prompt[i, :VOCAB], counts[i, :VOCAB], options[i]).argmax() for i in range(ROWS)
        ]
        return np.array(rows)

    np.testing.assert_array_equal(found, expect(state["prompt_mask"], state["output_counts"]))
    # Prompt tokens counted as output, or forgotten: both must show.
    charged = state["output_counts"] + state["prompt_mask"]
    assert (found != expect(state["prompt_mask"], charged)).any()
    assert (found != expect(np.zeros_like(state["prompt_mask"]), state["output_counts"])).any()


def test_state_is_found_by_row_not_by_place() -> None:
    logits = np.broadcast_to(make_logits(1), (ROWS, WIDTH)).copy()
    best = int(logits[0, :VOCAB].argmax())
    state = make_state()
    state["output_counts"][17, best] = 1
    rows = np.arange(ROWS, dtype=np.int32)
    rows[3] = 17
    found = run(logits, make_inputs(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), state, rows)
    assert (found.token_ids != best).tolist() == [i == 3 for i in range(ROWS)]


def test_bias_is_added_only_where_used_and_before_penalties() -> None:
    logits = make_logits()
    logits[:, 11] = 0.0
    state = make_state()
    state["bias_ids"][:, 299], state["bias_values"][:, 299] = 11, 30.0
    state["output_counts"][:, 11] = 1
    inputs = make_inputs(
        temperature=0.0,
        use_bias=[i % 2 == 0 for i in range(ROWS)],
        repetition_penalty=[1.0] * 8 + [100.0] * 8,  # 30 / 100 wins nothing; (0 / 100) + 30 would
    )
    plain = logits[:, :VOCAB].argmax(1)
    expected = [11 if i % 2 == 0 and i < 8 else plain[i] for i in range(ROWS)]
    np.testing.assert_array_equal(run(logits, inputs, state).token_ids, expected)


def test_min_tokens_suppresses_every_stop_id_unless_nothing_else_is_allowed() -> None:
    logits = make_logits()
    logits[:, [1, 900, 2]] = [70.0, 80.0, 60.0]
    state = make_state()
    state["stop_ids"][:, [0, 127]] = [900, 1]
    only_stop = np.zeros((ROWS, WORDS), np.int32)
    only_stop[:, 900 // 32] = 1 << 900 % 32
    only_stop[:, VOCAB // 32] |= np.int32(-(2**31))  # an allowed id beyond the vocabulary is no way out
    inputs = make_inputs(
        temperature=0.0,
        suppress_stop=[i < 8 for i in range(ROWS)],
        use_mask=[i in (0, 8) for i in range(ROWS)],
    )
    found = run(logits, inputs, state, None, only_stop).token_ids
    assert found.tolist() == [900] + [2] * 7 + [900] * 8


def test_the_mask_allows_exactly_its_bits() -> None:
    rng = np.random.default_rng(2)
    allowed = rng.random((ROWS, WORDS * 32)) < 0.01
    allowed[:, [0, 31, 32, VOCAB - 1]] = True
    bits = (allowed.reshape(ROWS, WORDS, 32).astype(np.int64) << np.arange(32)).sum(-1).astype(np.uint32)
    logits = make_logits()
    masked = np.where(allowed[:, :VOCAB], logits[:, :VOCAB], -np.inf)
    found = run(logits, make_inputs(temperature=0.0, use_mask=True), None, None, bits.view(np.int32))
    np.testing.assert_array_equal(found.token_ids, masked.argmax(1))
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}):
        drawn = run(logits, make_inputs(temperature=2.0, use_mask=True, **options), None, None, bits.view(np.int32))
        assert allowed[np.arange(ROWS), drawn.token_ids].all()
    unused = run(logits, make_inputs(temperature=0.0), None, None, bits.view(np.int32))
    np.testing.assert_array_equal(unused.token_ids, logits[:, :VOCAB].argmax(1))


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row[:VOCAB].astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_logprobs(found: SamplerOutput, logits: np.ndarray) -> None:
    for row, token_id in enumerate(found.token_ids):
        expected = log_softmax(logits[row])
        order = np.argsort(-expected, kind="stable")[:20]
        np.testing.assert_array_equal(found.top_ids[row], order)
        np.testing.assert_allclose(found.top_logprobs[row], expected[order], rtol=2e-6)
        np.testing.assert_allclose(found.logprob[row], expected[token_id], rtol=2e-6)
        assert found.rank[row] == 1 + (expected > expected[token_id]).sum()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = make_logits()
    state = make_state()
    state["bias_ids"][:, 0], state["bias_values"][:, 0] = 40, 90.0
    inputs = make_inputs(
        temperature=[0.0] * 8 + [2.0] * 8,
        num_logprobs=[0] + [-1] * 15,
        use_bias=[i % 2 == 0 for i in range(ROWS)],
        top_k=[0] * 12 + [50] * 4,
    )
    found = run(logits, inputs, state)
    assert (found.token_ids[::2] == 40).all()
    assert found.rank.max() > 20, "a chosen token beyond the twenty best is part of the test"
    check_logprobs(found, logits)
    with pytest.raises(AssertionError):
        check_logprobs(found, logits / np.float32(1.001))
    with pytest.raises(AssertionError):
        check_logprobs(replace(found, rank=found.rank + 1), logits)


def test_prompt_logprobs_score_given_tokens() -> None:
    logits = make_logits()
    targets = np.random.default_rng(4).integers(0, VOCAB, ROWS).astype(np.int32)
    score = jax.jit(prompt_logprobs, static_argnames="vocab_size")
    found = jax.tree.map(np.asarray, score(jnp.asarray(logits), jnp.asarray(targets), vocab_size=VOCAB))
    np.testing.assert_array_equal(found.token_ids, targets)
    check_logprobs(found, logits)


def test_a_small_vocabulary_fills_up_with_minus_one() -> None:
    logits = np.array([[0.0, 2.0, 1.0, 9.0], [1.0, 1.0, -np.inf, 9.0]], np.float32)
    found = prompt_logprobs(jnp.asarray(logits), jnp.array([1, 2]), vocab_size=3)
    assert found.top_ids[0].tolist() == [1, 2, 0] + [-1] * 17
    assert found.top_ids[1, :2].tolist() == [0, 1]
    assert found.rank.tolist() == [1, 3]
    assert np.isneginf(found.top_logprobs[0, 3:]).all()
    assert np.isneginf(found.logprob[1])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_rows_that_are_not_finite_are_told_and_harm_no_other(options: dict[str, float]) -> None:
    logits = make_logits()
    good = run(logits, make_inputs(**options))
    assert good.finite.all(), "the padding of the head does not count"
    broken = logits.copy()
    broken[0, 5] = np.nan
    broken[1, VOCAB - 1] = np.inf
    broken[2, 17] = -np.inf
    broken[3] = np.nan
    broken[4] = -np.inf
    broken[5, VOCAB] = np.nan
    found = run(broken, make_inputs(**options))
    assert found.finite.tolist() == [False] * 5 + [True] * 11
    assert ((found.token_ids >= 0) & (found.token_ids < VOCAB)).all()
    np.testing.assert_array_equal(found.token_ids[5:], good.token_ids[5:])


def test_everything_masked_still_gives_an_id() -> None:
    nothing = np.zeros((ROWS, WORDS), np.int32)
    for temperature in (0.0, 1.0):
        inputs = make_inputs(temperature=temperature, use_mask=True, top_k=50, top_p=0.9)
        found = run(make_logits(), inputs, None, None, nothing)
        assert ((found.token_ids >= 0) & (found.token_ids < VOCAB)).all()


def sorted_sizes(jaxpr: Any) -> Iterator[int]:
    """The lengths of all sorts and top_ks in a jaxpr, branches and loops included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("sort", "top_k", "approx_top_k"):
            yield equation.invars[0].aval.shape[-1]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sorted_sizes(inner)


def test_nothing_sorts_the_vocabulary() -> None:
    width = 4096
    inputs = make_inputs()
    state = RowState(
        **jax.tree.map(lambda a: jnp.zeros((MAX_ROWS, width if a.shape[1] == WIDTH else 4), a.dtype), make_state())
    )
    arguments = (jnp.zeros((ROWS, width)), inputs, state, jnp.arange(ROWS), jnp.zeros((ROWS, width // 32), jnp.int32))
    sizes = list(sorted_sizes(jax.make_jaxpr(lambda *a: sample(*a, vocab_size=width))(*arguments).jaxpr))
    assert sizes, "the lists of the best tokens use top_k: the walk must find it"
    assert max(sizes) < width / 4
    assert len(sizes) == 3, "only in the branch for log-probabilities: lanes, their order, the best 20"
    assert width // DEPTH in sizes
    mutation = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jax.lax.top_k(x, 3)[0], lambda: x[:, :3]))
    assert list(sorted_sizes(mutation(jnp.zeros((2, width))).jaxpr)) == [width]
