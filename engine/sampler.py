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
    count,
    draw_tokens,
    first_index_of,
    gather_lanes,
    lane_maxima,
    lane_sums,
    ordered_sum,
    pad_to_depth,
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
    known = _without_head_padding(logits, vocab_size)
    processed = lax.cond(
        jnp.any(changes_logits(inputs)),
        lambda: process_logits(known, inputs, row_state, rows, allow_mask),
        lambda: known,
    )
    token_ids = jnp.minimum(_choose(pad_to_depth(processed), inputs), vocab_size - 1)
    num_rows = logits.shape[0]

    def none() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return (
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
        )

    logprobs = lax.cond(jnp.any(inputs.num_logprobs >= 0), lambda: _logprobs(known, token_ids, vocab_size), none)
    return SamplerOutput(token_ids, _finite(logits, vocab_size), *logprobs)


def prompt_logprobs(logits: jax.Array, targets: jax.Array, *, vocab_size: int) -> SamplerOutput:
    """Log-probabilities of given tokens: logits f32[P, V], targets i32[P]; ``token_ids`` are the targets."""
    known = _without_head_padding(logits, vocab_size)
    return SamplerOutput(targets, _finite(logits, vocab_size), *_logprobs(known, targets, vocab_size))


def _without_head_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf for the ids that do not exist."""
    if logits.shape[1] == vocab_size:
        return logits
    return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size, logits, -jnp.inf)


def _finite(logits: jax.Array, vocab_size: int) -> jax.Array:
    # Not a slice, which would move a vocabulary that is shared by several devices.
    padding = lax.broadcasted_iota(jnp.int32, logits.shape, 1) >= vocab_size
    return jnp.all(jnp.isfinite(logits) | padding, axis=1)


def _choose(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """i32[R]: argmax (the first of equals) where greedy, else a draw."""
    maxima = lane_maxima(logits)
    maximum = jnp.max(maxima, axis=1)
    greedy_ids = first_index_of(logits, maximum)
    sampled = inputs.temperature >= GREEDY_EPSILON

    def drawn() -> jax.Array:
        draw = Draw(
            temperature=jnp.where(sampled, inputs.temperature, 1.0),
            maximum=jnp.where(jnp.isfinite(maximum), maximum, 0.0),
            top_k=jnp.where(inputs.top_k < logits.shape[1], inputs.top_k, 0),
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            uniform=uniform_per_row(inputs.seed, inputs.choice, inputs.position),
        )
        return jnp.where(sampled, draw_tokens(logits, draw.only(sampled), maxima), greedy_ids)

    return lax.cond(jnp.any(sampled), drawn, lambda: greedy_ids)


def _logprobs(
    logits: jax.Array, token_ids: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(logprob, rank, top_ids, top_logprobs) of the raw logits f32[R, V]."""
    logits = pad_to_depth(logits)
    maxima = lane_maxima(logits)
    maximum = jnp.max(maxima, axis=1)
    norm = maximum + jnp.log(ordered_sum(lane_sums(jnp.exp(logits - maximum[:, None]))))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)  # [R, 1]

    # The best 20 values lie in the 20 lanes with the best maxima.
    lanes = jnp.sort(lax.top_k(maxima, min(MAX_LOGPROBS, maxima.shape[1]))[1], axis=1)
    values, ids = gather_lanes(logits, lanes)
    num_top = min(MAX_LOGPROBS, vocab_size)
    top_values, places = lax.top_k(values, num_top)
    missing = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return (
        chosen[:, 0] - norm,
        1 + count(logits > chosen),
        jnp.pad(jnp.take_along_axis(ids, places, axis=1), missing, constant_values=-1),
        jnp.pad(top_values - norm[:, None], missing, constant_values=-jnp.inf),
    )
