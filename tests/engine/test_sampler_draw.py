"""Which tokens a draw keeps and how often each comes, against a sort in NumPy.

The uniform numbers are laid out as a grid, so a token of probability p must come p * N times, give
or take the two ends of its interval: no randomness, and a wrongly kept or dropped token shows.
"""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.sampler_search import (
    CANDIDATE_LANES,
    DEPTH,
    Draw,
    _pick,
    draw_tokens,
    kth_largest,
    lane_maxima,
    least_kept,
    least_of_candidates,
    uniform_per_row,
)

VOCAB = 4099
WIDTH = 4160
GRID = 256


@dataclass(frozen=True)
class Case:
    logits: str
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


def make_logits(kind: str) -> np.ndarray:
    """f32[WIDTH], -inf from VOCAB on, as the sampler hands it over."""
    rng = np.random.default_rng(5)
    row = np.full(WIDTH, -np.inf, np.float32)
    body = rng.normal(size=VOCAB).astype(np.float32) * np.float32(2.5)
    if kind == "peaked":
        body *= 2
    elif kind == "rounded":  # many exact ties
        body = np.round(body)
    elif kind == "equal":
        body[:] = 1.5
    elif kind == "few":  # all but seven are masked
        keep = rng.choice(VOCAB, 7, replace=False)
        body[np.setdiff1d(np.arange(VOCAB), keep)] = -np.inf
    elif kind == "signed":  # thresholds around zero
        body = np.where(rng.random(VOCAB) < 0.5, -0.0, body * np.float32(1e-3)).astype(np.float32)
    row[:VOCAB] = body
    return row


def reference(row: np.ndarray, case: Case) -> np.ndarray:
    """f64[VOCAB]: the probabilities, by sorting."""
    x = row[:VOCAB].astype(np.float64)
    order = np.argsort(-x, kind="stable")
    weights = np.exp((x - x.max()) / case.temperature)
    keep = np.ones(VOCAB, bool)
    if 0 < case.top_k < VOCAB:
        keep &= x >= x[order[case.top_k - 1]]
    if case.top_p < 1.0:
        kept = np.where(keep, weights, 0.0)
        mass = np.cumsum(kept[order])
        last = min(np.searchsorted(mass, case.top_p * mass[-1]), VOCAB - 1)
        keep &= x >= x[order[last]]
    keep &= weights >= case.min_p
    weights = np.where(keep, weights, 0.0)
    return weights / weights.sum()


def make_draw(case: Case, maximum: float, uniform: np.ndarray) -> Draw:
    rows = len(uniform)
    return Draw(
        temperature=jnp.full(rows, case.temperature, jnp.float32),
        maximum=jnp.full(rows, maximum, jnp.float32),
        top_k=jnp.full(rows, case.top_k if case.top_k < VOCAB else 0, jnp.int32),
        top_p=jnp.full(rows, case.top_p, jnp.float32),
        min_p=jnp.full(rows, case.min_p, jnp.float32),
        uniform=jnp.asarray(uniform, jnp.float32),
    )


@jax.jit
def grid_draw(logits: jax.Array, draw: Draw) -> jax.Array:
    return draw_tokens(logits, draw, lane_maxima(logits))


def counts_of(row: np.ndarray, case: Case) -> np.ndarray:
    uniform = (np.arange(GRID) + 0.5) / GRID
    ids = grid_draw(jnp.broadcast_to(row, (GRID, WIDTH)), make_draw(case, row[:VOCAB].max(), uniform))
    return np.bincount(np.asarray(ids), minlength=VOCAB)


def check(counts: np.ndarray, expected: np.ndarray) -> None:
    assert len(counts) == VOCAB, "an id past the vocabulary"
    assert not counts[expected == 0].any(), "a token that is not kept"
    assert np.abs(counts - GRID * expected).max() <= 1.01


CASES = [
    *(
        Case(kind, top_k, top_p)
        for kind, top_k, top_p in itertools.product(
            ("normal", "rounded"), (0, 1, 50, 700, VOCAB, 2**31 - 1), (1.0, 0.9, 1e-9)
        )
    ),
    *(Case(kind, 50, 0.9) for kind in ("peaked", "equal", "few", "signed")),
    *(Case(kind, 0, 0.5) for kind in ("peaked", "equal", "few", "signed")),
    Case("normal", min_p=0.1),
    Case("normal", min_p=1.0),
    Case("rounded", min_p=1e-3, temperature=2.0),
    Case("normal", 50, 0.9, 0.05, 0.7),
    Case("normal", 700, 0.95, 0.01, 1.7),
    Case("normal", 0, 0.8, 0.0, 0.3),
    Case("peaked", 3, 0.999, temperature=0.05),
    Case("normal", temperature=1e-5),
    Case("few"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_tokens_and_frequencies_match_a_sort(case: Case) -> None:
    row = make_logits(case.logits)
    check(counts_of(row, case), reference(row, case))


@pytest.mark.parametrize(
    ("case", "mutation"),
    [
        (Case("normal", 50, 0.9), {"top_p": 1.0}),
        (Case("normal", 50, 0.9), {"top_k": 0}),
        (Case("normal", 50, 0.9), {"top_k": 30}),
        (Case("normal", min_p=0.1), {"min_p": 0.0}),
        (Case("normal", 50), {"temperature": 0.8}),
    ],
    ids=str,
)
def test_the_check_notices_other_options(case: Case, mutation: dict[str, float]) -> None:
    row = make_logits(case.logits)
    with pytest.raises(AssertionError):
        check(counts_of(row, case), reference(row, replace(case, **mutation)))


def test_ties_at_the_threshold_stay() -> None:
    row, case = make_logits("rounded"), Case("rounded", 50)
    row[:VOCAB] = np.minimum(row[:VOCAB], 4.0)
    x = row[:VOCAB].astype(np.float64)
    exactly_50 = np.zeros(VOCAB)
    best = np.argsort(-x, kind="stable")[:50]
    exactly_50[best] = 1 / 50
    assert (reference(row, case) > 0).sum() > 60
    check(counts_of(row, case), reference(row, case))
    with pytest.raises(AssertionError):
        check(counts_of(row, case), exactly_50)


def test_top_p_refers_to_what_top_k_kept() -> None:
    """A joint search (mass over the whole vocabulary) would keep more: the check must tell them apart."""
    row = make_logits("normal")
    joint = reference(row, Case("normal", 50))
    full = reference(row, Case("normal", 0))
    assert full[joint > 0].sum() < 0.9, "the case is meant to tell joint from sequential"
    with pytest.raises(AssertionError):
        check(counts_of(row, Case("normal", 50, 0.9)), joint)
    check(counts_of(row, Case("normal", 50, 0.9)), reference(row, Case("normal", 50, 0.9)))


def test_thresholds_keep_exactly_the_set_of_a_sort() -> None:
    """Every kept token, however unlikely."""
    case = Case("normal", 700, 0.95, 0.01, 1.7)
    row = make_logits("normal")
    least = float(jax.jit(least_kept)(jnp.asarray(row)[None], make_draw(case, row.max(), np.zeros(1)))[0])
    np.testing.assert_array_equal(row[:VOCAB] >= least, reference(row, case) > 0)


def test_kth_largest_is_exact_for_every_k() -> None:
    values = np.full((1, DEPTH), -np.inf, np.float32)
    values[0, 3:10] = [3.0, -0.0, 0.0, -7.5, 3.0, 1e-30, 5e37]
    expected = np.sort(values[0])[::-1]
    for k in range(1, 8):
        found = kth_largest(jnp.asarray(values), jnp.array([k]), jnp.array([5e37], jnp.float32))
        # Compared as the sampler compares: a CPU takes subnormal thresholds for 0.
        np.testing.assert_array_equal(jnp.asarray(values) >= found[:, None], values >= expected[k - 1], str(k))
    assert float(kth_largest(jnp.asarray(values), jnp.array([0]), jnp.array([5e37], jnp.float32))[0]) == -np.inf


def test_candidates_decide_small_k_and_leave_the_rest() -> None:
    """A row is either decided exactly or not at all; ties over the 64 lanes are left to the full search."""
    rows = np.stack([make_logits("normal")] * 5 + [make_logits("equal")])
    draw = Draw(
        temperature=jnp.ones(6),
        maximum=jnp.asarray(rows[:, :VOCAB].max(1)),
        top_k=jnp.array([50, 64, 1000, 0, 0, 5]),
        top_p=jnp.array([0.9, 1.0, 0.9, 0.2, 0.99, 1.0]),
        min_p=jnp.zeros(6),
        uniform=jnp.full(6, 0.5),
    )
    logits = jnp.asarray(rows)
    least, decided = jax.jit(lambda x, draw: least_of_candidates(x, draw, lane_maxima(x)))(logits, draw)
    assert decided.tolist() == [True, True, False, True, False, False]
    assert -(-VOCAB // DEPTH) > CANDIDATE_LANES
    for row, top_k, top_p in ((0, 50, 0.9), (1, 64, 1.0), (3, 0, 0.2)):
        kept = reference(rows[row], Case("normal", top_k, top_p)) > 0
        assert float(least[row]) == rows[row, :VOCAB][kept].min()


@pytest.mark.parametrize("largest", [1 - 2.0**-24, 1.0, 2.0])
def test_rounding_never_picks_a_dropped_token(largest: float) -> None:
    """u next to 1, and even beyond: the last kept token, not what lies behind it."""
    rng = np.random.default_rng(0)
    weights = rng.random((64, 40)).astype(np.float32) * np.float32(1e-3)
    weights[:, 0] = 1.0
    weights[:, 30:] = 0.0
    weights[:, ::3] = 0.0
    total = jnp.sum(jnp.asarray(weights), axis=1)
    index, _ = _pick(jnp.asarray(weights), total * jnp.float32(largest))
    assert (np.take_along_axis(weights, np.asarray(index)[:, None], 1) > 0).all()
    row = make_logits("few")
    ids = grid_draw(
        jnp.broadcast_to(row, (GRID, WIDTH)), make_draw(Case("few"), row[:VOCAB].max(), np.full(GRID, largest))
    )
    assert (row[np.asarray(ids)] > -np.inf).all()


def test_the_random_numbers_are_uniform_over_positions_choices_and_seeds() -> None:
    count, bins = 20_000, 50
    zeros, steps = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    plain = np.zeros((count, 2), np.uint32)
    for name, arguments in {
        "position": (plain, zeros, steps),
        "choice": (plain, steps, zeros),
        "low word": (np.stack([steps, zeros], 1).astype(np.uint32), zeros, zeros),
        "high word": (np.stack([zeros, steps], 1).astype(np.uint32), zeros, zeros),
    }.items():
        numbers = np.asarray(uniform_per_row(*map(jnp.asarray, arguments)))
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        observed = np.bincount((numbers * bins).astype(int), minlength=bins)
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 100, (name, chi_square)  # 49 degrees of freedom: 1 in 30,000
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03, name
