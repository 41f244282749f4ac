"""Not a test file: a scheduler driven without a device: tokens come from a rule that can be worked out by hand."""

import numpy as np

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


class Harness:
    """A scheduler plus a stand-in for the device that keeps the KV pool's content as token ids."""

    def __init__(self, num_blocks=16, block_size=4, max_num_seqs=4, budget=16, max_model_len=40, caching=True):
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len
        )
        self.pool = np.full((num_blocks, block_size), -1)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.num_steps = 0
        self.bad_rows: set[str] = set()
        self.most_preemptions = 0

    def add(self, *args, **kwargs):
        self.scheduler.add_request(make_request(*args, **kwargs))

    def step(self):
        plan = self.scheduler.schedule()
        self.num_steps += 1
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= self.scheduler.max_num_batched_tokens
        assert len({row.request.row for row in plan.rows}) == len(plan.rows) <= self.scheduler.max_num_seqs
        for row in plan.rows:
            self._write(row)
        tokens = [self._sample(row) for row in plan.rows]
        for source, destination in plan.block_copies:
            self.pool[destination] = self.pool[source]
        self.take(self.scheduler.update(plan, self._sampled(plan, tokens)))
        self.scheduler.check_integrity()
        for request in self.scheduler.requests:
            self.most_preemptions = max(self.most_preemptions, request.timing.num_preemptions)
        return plan

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

    def _write(self, row):
        """The step's KV: each position's slot now holds its token."""
        size = self.kv.block_size
        for position in range(row.start, row.start + row.num_tokens):
            block = row.request.blocks[position // size].block_id
            assert block != 0, "a write to the null block"
            self.pool[block, position % size] = row.request.token_ids[position]

    def _sample(self, row):
        """Reads the row's whole history through its block table, as attention would."""
        if not row.samples:
            return 0
        source = row.parent.request if row.parent else row.request
        size = self.kv.block_size
        length = row.start + row.num_tokens
        history = [int(self.pool[source.blocks[p // size].block_id, p % size]) for p in range(length)]
        assert history == row.request.token_ids[:length], f"KV of {row.request} holds another sequence"
        return next_token(history, row.request.index)

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
