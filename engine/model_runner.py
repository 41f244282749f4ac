"""Dispatches plans to the device and reads results late."""

from dataclasses import dataclass, field, replace
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .buckets import BucketTable
from .config import EngineConfig
from .device_state import StateSpec, create_state
from .host_pool import HostPool
from .host_tier import ChunkCopy
from .input_batch import InputBatch
from .programs import LoadedModel, Programs
from .sampling_params import MAX_LOGPROBS
from .scheduler_output import PromptLogprobs, SampledRows, ScheduledRow, SchedulerOutput
from .step import BLOCK_COPIES, PROMPT_LOGPROB_ROWS


@dataclass(slots=True)
class PromptScores:
    """One call's share of a row's prompt logprobs, still on the device."""

    entry: int
    first: int
    """Prompt position of the first scored token."""
    token_ids: list[int]
    result: jax.Array


@dataclass(slots=True)
class StepHandle:
    """A dispatched step: its results are on their way to the host."""

    plan: SchedulerOutput
    result: jax.Array
    """i32[R, OUTPUT_WIDTH]"""
    prompt_scores: list[PromptScores] = field(default_factory=list)


class ModelRunner:
    """Owns the device state; turns plans into dispatches. No host sync happens in ``dispatch``."""

    def __init__(self, config: EngineConfig, model: LoadedModel, spec: StateSpec, buckets: BucketTable) -> None:
        self.buckets = buckets
        self.programs = Programs(config, model, spec, buckets)
        self._params = model.params
        self._spec = spec
        self._mesh = model.mesh
        self.one_program_at_a_time = model.mesh.size > 1 and model.mesh.devices.flat[0].platform == "cpu"
        """XLA's collectives on a CPU can wait for each other for ever when two programs are under way."""
        self._state = create_state(spec, model.mesh)
        self._batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_blocks=config.max_blocks_per_request,
            block_size=config.block_size,
            vocab_size=spec.vocab_size,
            work=model.work,
        )
        self._open_masks: dict[int, jax.Array] = {}
        num_chunks = config.cache.num_host_chunks
        self._host_pool = HostPool(spec.kv, model.mesh, num_chunks) if num_chunks else None

    def reset(self) -> None:
        """Rebuilds the device state after a step that failed and may have consumed it; all KV is lost."""
        for array in jax.tree.leaves(self._state):
            array.delete()  # what is left of it, before the pool's memory is asked for once more
        self._state = create_state(self._spec, self._mesh)
        if self._host_pool is not None:
            self._host_pool.reset()

    def probe(self) -> None:
        """Runs a step without requests. Raises whatever a device raises that cannot run one."""
        self.resolve(self.dispatch(SchedulerOutput()))

    def dispatch(self, plan: SchedulerOutput) -> StepHandle:
        """Sends one step to the device and returns at once."""
        for copy in plan.chunk_copies:
            self._copy_chunk(copy)
        for scheduled in plan.rows:
            if scheduled.admitted:
                self._state = self.programs.write_row()(self._state, self._batch.row_update(scheduled))
        bucket = self.buckets.select(plan.num_tokens, len(plan.rows), decode_only=plan.decode_only)
        packed = self._batch.pack(plan, bucket)
        mask = self._open_mask(bucket.num_rows)
        self._state, result = self.programs.step(bucket)(self._params, self._state, packed, mask)
        if self.one_program_at_a_time:
            jax.block_until_ready((self._state, result))
        handle = StepHandle(plan, result)
        self._score_prompts(handle)
        self._copy_blocks(plan.block_copies)
        result.copy_to_host_async()
        return handle

    def resolve(self, handle: StepHandle) -> SampledRows:
        """Waits for a step's results and splits them by field."""
        table = np.asarray(handle.result)
        sampled = SampledRows(token_ids=table[:, 0], finite=table[:, 1] != 0, **_logprob_fields(table))
        for scores in handle.prompt_scores:
            fields = _logprob_fields(np.asarray(scores.result)[: len(scores.token_ids)])
            part = PromptLogprobs(first=scores.first, token_ids=np.array(scores.token_ids), **fields)
            before = sampled.prompt_logprobs.get(scores.entry)
            sampled.prompt_logprobs[scores.entry] = part if before is None else _join(before, part)
        return sampled

    def _open_mask(self, num_rows: int) -> jax.Array:
        """An allow-mask that allows everything, resident on the device."""
        if num_rows not in self._open_masks:
            full = np.full((num_rows, self.programs.mask_words), -1, np.int32)
            self._open_masks[num_rows] = jax.device_put(full, NamedSharding(self._mesh, P()))
        return self._open_masks[num_rows]

    def _copy_chunk(self, copy: ChunkCopy) -> None:
        assert self._host_pool is not None
        if copy.to_host:
            self._host_pool.save(self.programs.swap_out(), self._state.kv, copy)
        else:
            kv = self._host_pool.restore(self.programs.swap_in(), self._state.kv, copy)
            self._state = replace(self._state, kv=kv)

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for at in range(0, len(pairs), BLOCK_COPIES):
            padded = np.full((BLOCK_COPIES, 2), self._spec.kv.num_blocks, np.int32)
            part = pairs[at : at + BLOCK_COPIES]
            padded[: len(part)] = part
            self._state = self.programs.copy_blocks()(self._state, padded)

    def _score_prompts(self, handle: StepHandle) -> None:
        """Dispatches prompt logprobs for rows that ask, ``PROMPT_LOGPROB_ROWS`` positions a call."""
        offset = 0
        for entry, scheduled in enumerate(handle.plan.rows):
            if scheduled.request.wants_prompt_logprobs:
                self._score_row(handle, entry, scheduled, offset)
            offset += scheduled.num_tokens

    def _score_row(self, handle: StepHandle, entry: int, scheduled: ScheduledRow, offset: int) -> None:
        request, start = scheduled.request, scheduled.start
        end = min(start + scheduled.num_tokens, request.num_prompt_tokens - 1)
        for at in range(start, end, PROMPT_LOGPROB_ROWS):
            count = min(PROMPT_LOGPROB_ROWS, end - at)
            targets = request.token_ids[at + 1 : at + 1 + count]
            packed = np.zeros((2, PROMPT_LOGPROB_ROWS), np.int32)
            packed[0, :count] = np.arange(count) + (offset + at - start)
            packed[1, :count] = targets
            result = self.programs.score_prompt()(self._params, self._state.hidden, packed)
            if self.one_program_at_a_time:
                result.block_until_ready()
            result.copy_to_host_async()
            handle.prompt_scores.append(PromptScores(entry, at + 1, targets, result))


class _LogprobFields(TypedDict):
    logprobs: np.ndarray
    ranks: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


def _logprob_fields(table: np.ndarray) -> _LogprobFields:
    top = 4 + MAX_LOGPROBS
    return {
        "logprobs": np.ascontiguousarray(table[:, 2]).view(np.float32),
        "ranks": table[:, 3],
        "top_token_ids": table[:, 4:top],
        "top_logprobs": np.ascontiguousarray(table[:, top:]).view(np.float32),
    }


def _join(first: PromptLogprobs, second: PromptLogprobs) -> PromptLogprobs:
    names = ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    return PromptLogprobs(
        first=first.first, **{name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}
    )
