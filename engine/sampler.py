"""The sampler: from logits to tokens and log-probabilities, as pure functions inside the step.

A row's token depends on its own logits, options, seed, choice and position, never on the
other rows or on how many there are. Optional parts are branches, so that a batch pays only for
what some row of it asks for. ``sampler_search`` tells how a token is drawn without a sort.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .sampler_logits import RowState, SamplingInputs, changes_logits, process_logits, without_padding
from .sampler_search import (
    Draw,
    draw_tokens,
    first_index_of,
    fold,
    fold_sum,
    gather_lanes,
    lane_maxima,
    uniform_per_row,
)
from .sampling_params import GREEDY_EPSILON, MAX_LOGPROBS

__all__ = ["RowState", "SamplerOutput", "SamplingInputs", "prompt_logprobs", "sample"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    """One token per row. Without any row that asks for log-probabilities the last four are 0."""

    token_ids: jax.Array
    """i32[R], always inside the vocabulary."""
    finite: jax.Array
    """bool[R]: all raw logits of the row are finite; if not, the token means nothing."""
    logprob: jax.Array
    """f32[R]: natural log, of the raw logits' softmax; -inf is possible."""
    rank: jax.Array
    """i32[R]: 1 + the number of tokens with a larger raw logit."""
    top_ids: jax.Array
    """i32[R, 20], best first; -1 past the end of a vocabulary of less than 20."""
    top_logprobs: jax.Array
    """f32[R, 20]; -inf past the end."""


def sample(
    logits: jax.Array,
    inputs: SamplingInputs,
    row_state: RowState,
    rows: jax.Array,
    allow_mask: jax.Array,
    *,
    vocab_size: int,
) -> SamplerOutput:
    """Draws one token per row.

    logits f32[R, V]; rows i32[R] indexes ``row_state`` (outside of it: padding); allow_mask
    i32[R, ceil(V/32)], bit j of word w allows id 32w + j. Ids from ``vocab_size`` on are padding of
    the head: never drawn, never reported. Log-probabilities are of the raw logits; then, as in
    vLLM: mask, bias, stop ids, penalties, temperature, top-k, top-p, min-p.
    """
    max_rows = row_state.output_counts.shape[0]
    inputs = without_padding(inputs, (rows >= 0) & (rows < max_rows))
    processed = lax.cond(
        jnp.any(changes_logits(inputs)),
        lambda: process_logits(logits, inputs, row_state, rows, allow_mask, vocab_size),
        lambda: logits,
    )
    token_ids = _choose(processed, inputs, vocab_size)
    num_rows = logits.shape[0]

    def none() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return (
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
        )

    logprobs = lax.cond(jnp.any(inputs.num_logprobs >= 0), lambda: _logprobs(logits, token_ids, vocab_size), none)
    return SamplerOutput(token_ids, _finite(logits, vocab_size), *logprobs)


def prompt_logprobs(logits: jax.Array, targets: jax.Array, *, vocab_size: int) -> SamplerOutput:
    """Log-probabilities of given tokens: logits f32[P, V], targets i32[P]; ``token_ids`` are the targets."""
    return SamplerOutput(targets, _finite(logits, vocab_size), *_logprobs(logits, targets, vocab_size))


def _finite(logits: jax.Array, size: int) -> jax.Array:
    # A maximum keeps NaN, and NaN is not less than infinity.
    magnitude = fold(jnp.maximum, lambda part, _: jnp.abs(part), logits, size, 0.0)
    return jnp.max(magnitude, axis=1) < jnp.inf


def _choose(logits: jax.Array, inputs: SamplingInputs, size: int) -> jax.Array:
    """i32[R]: argmax (the first of equals) where greedy, else a draw."""
    maxima = lane_maxima(logits, size)
    maximum = jnp.max(maxima, axis=1)
    greedy_ids = first_index_of(logits, maximum, size)
    sampled = inputs.temperature >= GREEDY_EPSILON

    def drawn() -> jax.Array:
        draw = Draw(
            temperature=jnp.where(sampled, inputs.temperature, 1.0),
            maximum=jnp.where(jnp.isfinite(maximum), maximum, 0.0),
            top_k=jnp.where(sampled & (inputs.top_k < size), inputs.top_k, 0),
            top_p=jnp.where(sampled, inputs.top_p, 1.0),
            min_p=jnp.where(sampled, inputs.min_p, 0.0),
            uniform=uniform_per_row(inputs.seed, inputs.choice, inputs.position),
        )
        return jnp.where(sampled, draw_tokens(logits, draw, sampled, maxima, size), greedy_ids)

    return lax.cond(jnp.any(sampled), drawn, lambda: greedy_ids)


def _logprobs(logits: jax.Array, token_ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(logprob, rank, top_ids, top_logprobs) of the raw logits f32[R, V]."""
    maxima = lane_maxima(logits, size)
    maximum = jnp.max(maxima, axis=1)
    total = fold_sum(fold(jnp.add, lambda part, _: jnp.exp(part - maximum[:, None]), logits, size))
    norm = maximum + jnp.log(total)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)  # [R, 1]
    larger = fold(jnp.add, lambda part, _: (part > chosen).astype(jnp.int32), logits, size)

    # The best 20 values lie in the 20 lanes with the best maxima.
    lanes = jnp.sort(lax.top_k(maxima, min(MAX_LOGPROBS, maxima.shape[1]))[1], axis=1)
    values, ids = gather_lanes(logits, lanes, size)
    count = min(MAX_LOGPROBS, size)
    top_values, places = lax.top_k(values, count)
    top_ids = jnp.take_along_axis(ids, places, axis=1)
    missing = ((0, 0), (0, MAX_LOGPROBS - count))
    return (
        chosen[:, 0] - norm,
        1 + jnp.sum(larger, axis=1),
        jnp.pad(top_ids, missing, constant_values=-1),
        jnp.pad(top_values - norm[:, None], missing, constant_values=-jnp.inf),
    )
