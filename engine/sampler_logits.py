"""What requests may do to their logits before a token is drawn: masks, biases and penalties."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """How to sample each of the R rows of a bucket."""

    temperature: jax.Array
    """f32[R]: 0 is greedy."""
    top_k: jax.Array
    """i32[R]: 0 is off."""
    top_p: jax.Array
    """f32[R]: 1 is off."""
    min_p: jax.Array
    """f32[R]: 0 is off."""
    repetition_penalty: jax.Array
    """f32[R]: 1 is off."""
    presence_penalty: jax.Array
    """f32[R]: 0 is off."""
    frequency_penalty: jax.Array
    """f32[R]: 0 is off."""
    seed: jax.Array
    """u32[R, 2]: low and high word of the 64-bit seed."""
    choice: jax.Array
    """i32[R]: which of the request's n choices."""
    position: jax.Array
    """i32[R]: index in the sequence of the token to be drawn."""
    num_logprobs: jax.Array
    """i32[R]: -1 none, 0 the chosen token only, else how many alternatives."""
    suppress_stop: jax.Array
    """bool[R]: min_tokens is not reached yet."""
    use_bias: jax.Array
    """bool[R]"""
    use_mask: jax.Array
    """bool[R]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """What the sampler remembers per row on the device, for all Rmax rows."""

    output_counts: jax.Array
    """i32[Rmax, V]: how often a token was generated."""
    prompt_mask: jax.Array
    """bool[Rmax, V]: the token is in the prompt."""
    bias_ids: jax.Array
    """i32[Rmax, 300]: distinct ids; padding V."""
    bias_values: jax.Array
    """f32[Rmax, 300]"""
    stop_ids: jax.Array
    """i32[Rmax, 128]: padding V."""


def without_padding(inputs: SamplingInputs, present: jax.Array) -> SamplingInputs:
    """Greedy and without options where ``present`` bool[R] is false, so that padding never enters a branch."""
    return replace(
        inputs,
        temperature=jnp.where(present, inputs.temperature, 0.0),
        repetition_penalty=jnp.where(present, inputs.repetition_penalty, 1.0),
        presence_penalty=jnp.where(present, inputs.presence_penalty, 0.0),
        frequency_penalty=jnp.where(present, inputs.frequency_penalty, 0.0),
        num_logprobs=jnp.where(present, inputs.num_logprobs, -1),
        suppress_stop=inputs.suppress_stop & present,
        use_bias=inputs.use_bias & present,
        use_mask=inputs.use_mask & present,
    )


def uses_penalties(inputs: SamplingInputs) -> jax.Array:
    """bool[R]"""
    return (inputs.repetition_penalty != 1.0) | (inputs.presence_penalty != 0.0) | (inputs.frequency_penalty != 0.0)


def changes_logits(inputs: SamplingInputs) -> jax.Array:
    """bool[R]: rows for which ``process_logits`` does something."""
    return inputs.use_mask | inputs.use_bias | inputs.suppress_stop | uses_penalties(inputs)


def process_logits(
    logits: jax.Array, inputs: SamplingInputs, row_state: RowState, rows: jax.Array, allow_mask: jax.Array
) -> jax.Array:
    """f32[R, V] -> f32[R, V]: allow-mask, logit bias, stop ids, penalties, in this order.

    Rows that use none of them come out as they went in. ``rows`` i32[R] indexes ``row_state``;
    rows outside of it have no state.
    """
    for used, change in (
        (inputs.use_mask, lambda x: _mask(x, allow_mask, inputs.use_mask)),
        (inputs.use_bias, lambda x: _bias(x, row_state, rows, inputs.use_bias)),
        (inputs.suppress_stop, lambda x: _suppress_stop(x, row_state, rows, inputs.suppress_stop)),
        (uses_penalties(inputs), lambda x: _penalise(x, inputs, row_state, rows)),
    ):
        logits = lax.cond(jnp.any(used), change, lambda x: x, logits)
    return logits


def _mask(logits: jax.Array, allow_mask: jax.Array, used: jax.Array) -> jax.Array:
    bits = (allow_mask[:, :, None] >> jnp.arange(32)) & 1  # [R, words, 32]
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | ~used[:, None], logits, -jnp.inf)


def _row_ids(ids: jax.Array, rows: jax.Array, used: jax.Array, vocab_size: int) -> jax.Array:
    """i32[R, n]: the rows' ids; V, which a scatter drops, where they are not used."""
    picked = ids.at[rows].get(mode="fill", fill_value=vocab_size)
    return jnp.where(used[:, None], picked, vocab_size)


def _bias(logits: jax.Array, row_state: RowState, rows: jax.Array, used: jax.Array) -> jax.Array:
    ids = _row_ids(row_state.bias_ids, rows, used, logits.shape[1])
    values = row_state.bias_values.at[rows].get(mode="fill", fill_value=0.0)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(values, mode="drop")


def _suppress_stop(logits: jax.Array, row_state: RowState, rows: jax.Array, used: jax.Array) -> jax.Array:
    ids = _row_ids(row_state.stop_ids, rows, used, logits.shape[1])
    suppressed = logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")
    # Where a grammar allows nothing but the end, the end wins over min_tokens.
    possible = jnp.any(suppressed > -jnp.inf, axis=1, keepdims=True)
    return jnp.where(possible, suppressed, logits)


def _penalise(logits: jax.Array, inputs: SamplingInputs, row_state: RowState, rows: jax.Array) -> jax.Array:
    counts = row_state.output_counts.at[rows].get(mode="fill", fill_value=0)
    in_prompt = row_state.prompt_mask.at[rows].get(mode="fill", fill_value=False)
    seen = in_prompt | (counts > 0)
    repetition = inputs.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - inputs.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, inputs.presence_penalty[:, None], 0.0)
