"""The programs of the engine, as pure functions: state in, state out.

``step`` is the one program of a bucket: unpack, decoder over the paged pool, sampler. The
others write a row when a request is admitted, copy blocks for forks, and give prompt logprobs.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..models.attention_metadata import AttentionMetadata
from ..models.decoder import merge
from ..pallas_kernels.packed_array import PackedArray
from ..pallas_kernels.work_lists import WorkListSpec
from .buckets import Bucket
from .device_state import DeviceState
from .input_batch import LAST_TOKEN, NUM_FLOAT_PARAMS, ROW_PARAMS, PackedLayout
from .sampler import SamplerOutput, SamplingInputs, prompt_logprobs, sample
from .sampling_params import MAX_LOGPROBS

OUTPUT_WIDTH = 4 + 2 * MAX_LOGPROBS
"""Columns of a step's result: token id, finite, logprob bits, rank, 20 ids, 20 logprobs' bits."""
PROMPT_LOGPROB_ROWS = 256
"""Hidden rows per call of the prompt logprobs program."""
BLOCK_COPIES = 32
"""Block pairs per call of the copy program."""


@dataclass(frozen=True)
class StepSpec:
    """What is static in a bucket's program."""

    bucket: Bucket
    layout: PackedLayout
    block_size: int
    num_slots: int
    vocab_size: int
    """Ids below this can be sampled; the head may be wider."""
    work: WorkListSpec | None = None
    """How the attention kernels' work lists lie in the inputs; None: there are none."""


def step(
    graphdef: Any, spec: StepSpec, params: Any, state: DeviceState, packed: jax.Array, allow_mask: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """One step: packed int32 inputs (``packed_layout``) -> new state, results i32[R, OUTPUT_WIDTH].

    ``allow_mask`` i32[R, ceil(V/32)] says which ids a row may sample; read only when asked for.
    """
    inputs = _unpack(packed, spec.layout)
    rows, deltas = inputs["rows"], inputs["table_deltas"]
    block_tables = state.block_tables.at[deltas[:, 0], deltas[:, 1]].set(deltas[:, 2], mode="drop")
    row_of_token, metadata = _metadata(inputs, block_tables, spec)
    if spec.work is not None:
        fields = {name: PackedArray(packed, where.start, shape) for name, (where, shape) in spec.layout.slices.items()}
        work = spec.work.plans(fields, spec.bucket.decode_only)
        metadata = replace(metadata, work=work, work_windows=spec.work.windows)
    last = state.last_tokens.at[rows[row_of_token]].get(mode="fill", fill_value=0)
    token_ids = jnp.where(inputs["token_ids"] == LAST_TOKEN, last, inputs["token_ids"])

    model = merge(graphdef, params)
    hidden, kv = model(token_ids, state.kv, metadata)
    logits = model.compute_logits(hidden[inputs["logits_indices"]])
    result = sample(logits, _sampling_inputs(inputs), state.rows, rows, allow_mask, vocab_size=spec.vocab_size)

    sampled_rows = jnp.where(inputs["samples"] > 0, rows, state.last_tokens.shape[0])
    counts = state.rows.output_counts.at[sampled_rows, result.token_ids].add(1, mode="drop")
    new_state = replace(
        state,
        kv=kv,
        last_tokens=state.last_tokens.at[sampled_rows].set(result.token_ids, mode="drop"),
        block_tables=block_tables,
        rows=replace(state.rows, output_counts=counts),
        # A scatter: a slice update becomes a copy on a stream of its own, which cuts a GPU's command buffer in two.
        hidden=state.hidden.at[jnp.arange(spec.bucket.num_tokens)].set(hidden.astype(state.hidden.dtype)),
    )
    return new_state, _pack_result(result)


def write_row(layout: PackedLayout, state: DeviceState, packed: jax.Array) -> DeviceState:
    """Writes one row of the state in full for its new owner (``row_update_layout``)."""
    inputs = _unpack(packed, layout)
    row = inputs["row"][0]
    vocab_size = state.rows.output_counts.shape[1]

    def count_tokens() -> tuple[jax.Array, jax.Array]:
        place = jnp.arange(inputs["token_ids"].shape[0])
        in_prompt = place < inputs["num_prompt_tokens"][0]
        in_output = ~in_prompt & (place < inputs["num_tokens"][0])
        prompt = jnp.where(in_prompt, inputs["token_ids"], vocab_size)
        output = jnp.where(in_output, inputs["token_ids"], vocab_size)
        mask = jnp.zeros(vocab_size, jnp.bool_).at[prompt].set(True, mode="drop")
        return mask, jnp.zeros(vocab_size, jnp.int32).at[output].add(1, mode="drop")

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(vocab_size, jnp.bool_), jnp.zeros(vocab_size, jnp.int32)

    mask, counts = jax.lax.cond(inputs["uses_penalties"][0] > 0, count_tokens, nothing)
    values = jax.lax.bitcast_convert_type(inputs["bias_values"], jnp.float32)
    rows = replace(
        state.rows,
        output_counts=state.rows.output_counts.at[row].set(counts),
        prompt_mask=state.rows.prompt_mask.at[row].set(mask),
        bias_ids=state.rows.bias_ids.at[row].set(inputs["bias_ids"]),
        bias_values=state.rows.bias_values.at[row].set(values),
        stop_ids=state.rows.stop_ids.at[row].set(inputs["stop_ids"]),
    )
    return replace(
        state,
        rows=rows,
        last_tokens=state.last_tokens.at[row].set(0),
        block_tables=state.block_tables.at[row].set(inputs["block_table"]),
    )


def copy_blocks(state: DeviceState, pairs: jax.Array) -> DeviceState:
    """Copies whole blocks within the pool; pairs i32[BLOCK_COPIES, 2] (source, destination), padding num_blocks."""
    kv = [pool.at[pairs[:, 1]].set(pool.at[pairs[:, 0]].get(mode="clip"), mode="drop") for pool in state.kv]
    return replace(state, kv=kv)


def score_prompt(graphdef: Any, vocab_size: int, params: Any, hidden: jax.Array, packed: jax.Array) -> jax.Array:
    """Prompt logprobs from the last step's hidden states ``[max_num_batched_tokens, D]``, which are not donated.

    packed i32[2, P]: token index into the step, id of the token after it. Returns
    i32[P, OUTPUT_WIDTH] as ``step`` does.
    """
    model = merge(graphdef, params)
    logits = model.compute_logits(hidden[packed[0]])
    return _pack_result(prompt_logprobs(logits, packed[1], vocab_size=vocab_size))


def _unpack(packed: jax.Array, layout: PackedLayout) -> dict[str, jax.Array]:
    return {name: packed[where].reshape(shape) for name, (where, shape) in layout.slices.items()}


def _metadata(
    inputs: dict[str, jax.Array], block_tables: jax.Array, spec: StepSpec
) -> tuple[jax.Array, AttentionMetadata]:
    """Works out each token's row, position and slot on the device; the host sends only what it alone knows."""
    starts, seq_lens = inputs["query_start_loc"], inputs["seq_lens"]
    tables = block_tables.at[inputs["rows"]].get(mode="fill", fill_value=0)
    token = jnp.arange(spec.bucket.num_tokens)
    if spec.bucket.decode_only:
        row_of_token, valid = token, seq_lens > 0
        positions = jnp.maximum(seq_lens - 1, 0)
    else:
        last_row = spec.bucket.num_rows - 1
        # By comparing all: one small launch, where a binary search would be a loop of some twenty.
        ends_before = jnp.searchsorted(starts, token, side="right", method="compare_all")
        row_of_token = jnp.clip(ends_before - 1, 0, last_row)
        valid = token < starts[-1]
        positions = seq_lens[row_of_token] - starts[row_of_token + 1] + token
        positions = jnp.where(valid, positions, 0)
    slots = tables[row_of_token, positions // spec.block_size] * spec.block_size + positions % spec.block_size
    metadata = AttentionMetadata(
        positions=positions,
        slot_mapping=jnp.where(valid, slots, spec.num_slots),
        block_tables=tables,
        query_start_loc=starts,
        seq_lens=seq_lens,
        decode_only=spec.bucket.decode_only,
    )
    return row_of_token, metadata


def _sampling_inputs(inputs: dict[str, jax.Array]) -> SamplingInputs:
    params = inputs["params"]
    floats = jax.lax.bitcast_convert_type(params[:, :NUM_FLOAT_PARAMS], jnp.float32)
    column = {name: params[:, i] for i, name in enumerate(ROW_PARAMS)}
    column |= {name: floats[:, i] for i, name in enumerate(ROW_PARAMS[:NUM_FLOAT_PARAMS])}
    seed = jnp.stack([column["seed_low"], column["seed_high"]], axis=1)
    return SamplingInputs(
        temperature=column["temperature"],
        top_k=column["top_k"],
        top_p=column["top_p"],
        min_p=column["min_p"],
        repetition_penalty=column["repetition_penalty"],
        presence_penalty=column["presence_penalty"],
        frequency_penalty=column["frequency_penalty"],
        seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
        choice=column["choice"],
        position=inputs["positions"],
        num_logprobs=column["num_logprobs"],
        suppress_stop=inputs["suppress_stop"] > 0,
        use_bias=column["use_bias"] > 0,
        use_mask=column["use_mask"] > 0,
    )


def _pack_result(result: SamplerOutput) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    columns = [result.token_ids, result.finite.astype(jnp.int32), bits(result.logprob), result.rank]
    return jnp.concatenate([jnp.stack(columns, axis=1), result.top_ids, bits(result.top_logprobs)], axis=1)
