"""The only padder: a plan becomes one int32 vector, laid out for its bucket.

Floats travel bit-cast. One vector is one transfer; the step slices it inside the graph
(``step_inputs`` in ``step.py``) by the same layout.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from .buckets import Bucket
from .request import Request
from .sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from .scheduler_output import ScheduledRow, SchedulerOutput

ROW_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "seed_low",
    "seed_high",
    "choice",
    "num_logprobs",
    "use_bias",
    "use_mask",
)
"""Columns of the per-row sampling parameters; the first six are float32 bits."""
NUM_FLOAT_PARAMS = 6
LAST_TOKEN = -1
"""In ``token_ids``: take the row's last sampled token from the device."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each field lies in a packed int32 vector: name -> (slice, shape)."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]
    size: int
    slices: Mapping[str, tuple[slice, tuple[int, ...]]] = field(compare=False, repr=False)

    @classmethod
    def of(cls, **shapes: tuple[int, ...]) -> "PackedLayout":
        """The fields one after the other, in the order given."""
        slices, offset = {}, 0
        for name, shape in shapes.items():
            end = offset + math.prod(shape)
            slices[name] = slice(offset, end), shape
            offset = end
        return cls(tuple(shapes.items()), offset, slices)

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a packed vector, as views to write to."""
        return {name: packed[where].reshape(shape) for name, (where, shape) in self.slices.items()}


class AttentionWork(Hashable, Protocol):
    """What the attention kernels want planned on the host (``pallas_kernels.work_lists``); hashable."""

    def fields(self, num_tokens: int, num_rows: int, decode_only: bool) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of the fields of a bucket."""

    def fill(self, views: Mapping[str, np.ndarray], num_tokens: int, decode_only: bool) -> None:
        """Writes them, from ``query_start_loc`` and ``seq_lens`` in ``views``."""


@lru_cache(maxsize=256)
def packed_layout(bucket: Bucket, block_size: int, work: AttentionWork | None = None) -> PackedLayout:
    """The layout of a bucket's inputs.

    token_ids [T]; query_start_loc [R+1]; seq_lens [R] (KV length including this step, 0 for
    padding and forks); rows [R] (device state row, ``max_num_seqs`` for padding);
    logits_indices [R] (token whose logits the row samples from); positions [R] (place of the
    token being drawn); samples [R] (0: the result is not used); suppress_stop [R]; params
    [R, 13]; table_deltas [C, 3] (row, index, block id; padding row ``max_num_seqs``); then the
    fields of ``work``.
    """
    num_tokens, num_rows = bucket.num_tokens, bucket.num_rows
    num_deltas = -(-num_tokens // block_size) + num_rows
    return PackedLayout.of(
        token_ids=(num_tokens,),
        query_start_loc=(num_rows + 1,),
        seq_lens=(num_rows,),
        rows=(num_rows,),
        logits_indices=(num_rows,),
        positions=(num_rows,),
        samples=(num_rows,),
        suppress_stop=(num_rows,),
        params=(num_rows, len(ROW_PARAMS)),
        table_deltas=(num_deltas, 3),
        **({} if work is None else work.fields(num_tokens, num_rows, bucket.decode_only)),
    )


def row_update_layout(max_model_len: int, max_blocks: int) -> PackedLayout:
    """The layout of one row's full device state, written when a request is admitted to it."""
    return PackedLayout.of(
        row=(1,),
        num_prompt_tokens=(1,),
        num_tokens=(1,),
        uses_penalties=(1,),
        block_table=(max_blocks,),
        bias_ids=(MAX_LOGIT_BIAS,),
        bias_values=(MAX_LOGIT_BIAS,),
        stop_ids=(MAX_STOP_TOKEN_IDS,),
        token_ids=(max_model_len,),
    )


class InputBatch:
    """Packs plans. Keeps each row's sampling parameters, so that a step only gathers them."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        work: AttentionWork | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.work = work
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._params = np.zeros((max_num_seqs, len(ROW_PARAMS)), np.int32)
        self._drawn_positions = np.full(max_num_seqs, -1)
        """Place in the sequence of the token that each row drew last; -1 when its owner has drawn none in this row."""
        self._first_stops = np.zeros(max_num_seqs, int)
        """First place in the sequence where a stop id may be drawn (``min_tokens``)."""
        self._row_layout = row_update_layout(max_model_len, max_blocks)

    def row_update(self, scheduled: ScheduledRow) -> np.ndarray:
        """The full device state of a row that a request was admitted to; also notes its sampling parameters."""
        request = scheduled.request
        self._params[request.row] = _row_params(request)
        self._drawn_positions[request.row] = -1
        self._first_stops[request.row] = request.num_prompt_tokens + request.params.min_tokens
        packed = np.zeros(self._row_layout.size, np.int32)
        views = self._row_layout.views(packed)
        views["row"][0] = request.row
        views["num_prompt_tokens"][0] = request.num_prompt_tokens
        views["num_tokens"][0] = request.num_tokens
        views["uses_penalties"][0] = request.params.uses_penalties
        views["block_table"][: len(scheduled.new_block_ids)] = scheduled.new_block_ids
        bias = request.params.logit_bias or {}
        views["bias_ids"][:] = self.vocab_size
        views["bias_ids"][: len(bias)] = list(bias)
        views["bias_values"].view(np.float32)[: len(bias)] = list(bias.values())
        stop_ids = sorted(request.source.stop_token_ids) if request.params.min_tokens else []
        views["stop_ids"][:] = self.vocab_size
        views["stop_ids"][: len(stop_ids)] = stop_ids
        if request.params.uses_penalties:
            views["token_ids"][: request.num_tokens] = request.token_ids
        return packed

    def pack(self, plan: SchedulerOutput, bucket: Bucket) -> np.ndarray:
        """The plan as int32[layout.size], padded to the bucket."""
        layout = packed_layout(bucket, self.block_size, self.work)
        packed = np.zeros(layout.size, np.int32)
        views = layout.views(packed)
        count = len(plan.rows)
        rows = [entry.request.row for entry in plan.rows]
        views["rows"][:] = self.max_num_seqs
        views["rows"][:count] = rows
        views["params"][:count] = self._params[rows]
        query_lens = np.fromiter((entry.num_tokens for entry in plan.rows), np.int32, count)
        starts = views["query_start_loc"]
        np.cumsum(query_lens, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
        kv_lens = np.fromiter((entry.start + entry.num_tokens for entry in plan.rows), np.int32, count)
        views["positions"][:count] = kv_lens
        views["seq_lens"][:count] = np.where(query_lens > 0, kv_lens, 0)
        views["samples"][:count] = [entry.samples for entry in plan.rows]
        self._pack_tokens(plan, views, count)
        self._pack_deltas(plan, views["table_deltas"])
        if self.work is not None:
            self.work.fill(views, bucket.num_tokens, bucket.decode_only)
        return packed

    def _pack_tokens(self, plan: SchedulerOutput, views: dict[str, np.ndarray], count: int) -> None:
        token_ids, starts, indices = views["token_ids"], views["query_start_loc"], views["logits_indices"]
        rows, ends, samples = views["rows"][:count], views["positions"][:count], views["samples"][:count] > 0
        indices[:count] = starts[1 : count + 1] - 1
        views["suppress_stop"][:count] = self._first_stops[rows] > ends
        query_lens = starts[1 : count + 1] - starts[:count]
        on_device = (query_lens == 1) & (ends - 1 == self._drawn_positions[rows])
        token_ids[starts[:count][on_device]] = LAST_TOKEN
        if not on_device.all():
            entry_of = {id(scheduled): entry for entry, scheduled in enumerate(plan.rows)}
            for entry in np.flatnonzero(~on_device):
                scheduled = plan.rows[entry]
                if scheduled.parent is not None:
                    indices[entry] = indices[entry_of[id(scheduled.parent)]]
                else:
                    known = scheduled.request.token_ids[scheduled.start : ends[entry]]
                    token_ids[starts[entry] : starts[entry + 1]] = known
        self._drawn_positions[rows[samples]] = ends[samples]

    def _pack_deltas(self, plan: SchedulerOutput, deltas: np.ndarray) -> None:
        """Blocks added to rows that were running already; admitted rows were written in full."""
        deltas[:, 0] = self.max_num_seqs
        at = 0
        for scheduled in plan.rows:
            if scheduled.admitted or not scheduled.new_block_ids:
                continue
            first = len(scheduled.request.blocks) - len(scheduled.new_block_ids)
            for offset, block_id in enumerate(scheduled.new_block_ids):
                deltas[at] = scheduled.request.row, first + offset, block_id
                at += 1


def _row_params(request: Request) -> np.ndarray:
    params = request.params
    result = np.zeros(len(ROW_PARAMS), np.int32)
    result[:NUM_FLOAT_PARAMS].view(np.float32)[:] = (
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    result[NUM_FLOAT_PARAMS:] = (
        params.top_k,
        seed[0],
        seed[1],
        request.index,
        num_logprobs,
        params.logit_bias is not None,
        False,
    )
    return result
