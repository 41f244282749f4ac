"""Not a test file: a scheduler driven without a device: tokens come from a rule that can be worked out by hand."""

import numpy as np

from octavo.engine.buckets import BucketTable
from octavo.engine.input_batch import LAST_TOKEN, InputBatch, packed_layout, row_update_layout
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.messages import EngineRequest
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.scheduler_output import PromptLogprobs, SampledRows

VOCAB = 1000


def next_token(token_ids: list[int], choice: int) -> int:
    """Depends on the whole sequence, so a wrong history shows."""
    value = 17 + choice
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % VOCAB
    return value


def expected_tokens(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence, choice))
    return sequence[len(prompt) :]


def make_request(request_id: str, prompt: list[int], *, stops: frozenset[int] = frozenset(), salt=None, **params):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **params}),
        arrival_time_s=0.0,
        stop_token_ids=stops,
        eos_token_ids=stops,
        cache_salt=salt,
    )


class Device:
    """A stand-in for the device: reads packed inputs as the step does; its KV pool holds token ids."""

    def __init__(self, num_blocks, block_size, max_num_seqs, budget, max_model_len):
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.buckets = BucketTable(max_num_seqs, budget)
        self.batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=max_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
        )
        self.row_layout = row_update_layout(max_model_len, max_blocks)
        self.pool = np.full((num_blocks, block_size), -1)
        self.tables = np.zeros((max_num_seqs, max_blocks), int)
        self.last_tokens = np.zeros(max_num_seqs, int)

    def run(self, plan):
        """The step's writes; the token of each row of the plan, 0 where it draws none."""
        for row in plan.rows:
            if row.admitted:
                fields = self._unpack(self.batch.row_update(row), self.row_layout)
                self.tables[fields["row"][0]] = fields["block_table"]
                self.last_tokens[fields["row"][0]] = 0
        bucket = self.buckets.select(plan.num_tokens, len(plan.rows), decode_only=plan.decode_only)
        fields = self._unpack(self.batch.pack(plan, bucket), packed_layout(bucket, self.block_size))
        for row, index, block in fields["table_deltas"]:
            if row < len(self.tables):
                self.tables[row, index] = block
        histories = [self._compute(fields, entry) for entry in range(len(plan.rows))]
        tokens = [self._draw(plan, fields, histories, entry) for entry in range(len(plan.rows))]
        for source, destination in plan.block_copies:
            self.pool[destination] = self.pool[source]
        return tokens

    def _unpack(self, packed, layout):
        return layout.views(packed)

    def _compute(self, fields, entry):
        """Writes a row's tokens and reads its whole history through its block table, as attention would."""
        row, length = fields["rows"][entry], fields["seq_lens"][entry]
        first, end = fields["query_start_loc"][entry : entry + 2]
        slots = [(self.tables[row, p // self.block_size], p % self.block_size) for p in range(length)]
        for token_id, (block, place) in zip(
            fields["token_ids"][first:end], slots[length - (end - first) :], strict=True
        ):
            assert block != 0, "a write to the null block"
            self.pool[block, place] = self.last_tokens[row] if token_id == LAST_TOKEN else token_id
        return [int(self.pool[slot]) for slot in slots]

    def _draw(self, plan, fields, histories, entry):
        row = plan.rows[entry]
        if not fields["samples"][entry]:
            return 0
        source = next(i for i, other in enumerate(plan.rows) if other is (row.parent or row))
        assert fields["logits_indices"][entry] == fields["query_start_loc"][source + 1] - 1
        history, request = histories[source], row.request
        known = request.token_ids[: fields["positions"][entry]]
        assert history[: len(known)] == known, f"KV of {request} holds another sequence"
        assert len(history) <= len(known) + 1, "at most one token may be unknown to the host"
        token = next_token(history, request.index)
        self.last_tokens[fields["rows"][entry]] = token
        return token


class Harness:
    """A scheduler over a ``Device``."""

    def __init__(
        self, num_blocks=16, block_size=4, max_num_seqs=4, budget=16, max_model_len=40, caching=True, ahead=False
    ):
        self.plans_ahead = ahead
        self.num_ahead = 0
        self._ahead = None
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len
        )
        self.device = Device(num_blocks, block_size, max_num_seqs, budget, max_model_len)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.num_steps = 0
        self.bad_rows: set[str] = set()
        self.most_preemptions = 0

    def add(self, *args, **kwargs):
        self.scheduler.add_request(make_request(*args, **kwargs))

    def step(self):
        ready, self._ahead = self._ahead, None
        if ready is not None and not ready[0].is_live:
            ready = None
            if not self.scheduler.has_work:
                return None
        plan, tokens = ready or self._dispatch(self.scheduler.schedule())
        if self.plans_ahead and (ahead := self.scheduler.schedule_ahead(plan)) is not None:
            self._ahead = self._dispatch(ahead)
            self.num_ahead += 1
        self.take(self.scheduler.update(plan, self._sampled(plan, tokens)))
        self.scheduler.check_integrity()
        for request in self.scheduler.requests:
            self.most_preemptions = max(self.most_preemptions, request.timing.num_preemptions)
        return plan

    def _dispatch(self, plan):
        self.num_steps += 1
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= self.scheduler.max_num_batched_tokens
        assert len({row.request.row for row in plan.rows}) == len(plan.rows) <= self.scheduler.max_num_seqs
        return plan, self.device.run(plan)

    def take(self, outputs):
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.finished, f"{key} spoke after its end"
            self.outputs.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[key] = output.finish_reason.value

    def run(self, limit=2000):
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < limit, "no end in sight"
        assert self.kv.pool.num_free == self.kv.pool.num_usable
        return self.outputs

    def _sampled(self, plan, tokens):
        count = len(plan.rows)
        sampled = SampledRows(
            token_ids=np.array(tokens, np.int32),
            finite=np.array([row.request.request_id not in self.bad_rows for row in plan.rows]),
            logprobs=np.zeros(count, np.float32),
            ranks=np.ones(count, np.int32),
            top_token_ids=np.zeros((count, 20), np.int32),
            top_logprobs=np.zeros((count, 20), np.float32),
        )
        for entry, row in enumerate(plan.rows):
            request = row.request
            end = min(row.start + row.num_tokens, request.num_prompt_tokens - 1)
            if request.wants_prompt_logprobs and row.start < end:
                ids = np.array(request.token_ids[row.start + 1 : end + 1])
                sampled.prompt_logprobs[entry] = PromptLogprobs(
                    first=row.start + 1,
                    token_ids=ids,
                    logprobs=-ids.astype(np.float32),
                    ranks=np.ones(len(ids), np.int32),
                    top_token_ids=np.zeros((len(ids), 20), np.int32),
                    top_logprobs=np.zeros((len(ids), 20), np.float32),
                )
        return sampled
