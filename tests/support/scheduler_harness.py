"""Not a test file: the core's loop over a device that is worked out by hand: tokens come from a rule."""

from dataclasses import dataclass

import numpy as np

from octavo.engine.buckets import BucketTable
from octavo.engine.core import EngineCore
from octavo.engine.input_batch import (
    LAST_TOKEN,
    NUM_FLOAT_PARAMS,
    ROW_PARAMS,
    InputBatch,
    packed_layout,
    row_update_layout,
)
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.messages import EngineRequest
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.scheduler_output import PromptLogprobs, SampledRows, SchedulerOutput

VOCAB = 1000


@dataclass(frozen=True)
class Rule:
    """How the next token follows from a sequence: each part that the real step looks at changes it."""

    choice: int = 0
    seed: int = 0
    """0: temperature 1.0, which this device takes for "the seed plays no part"."""
    penalised: bool = False
    banned: frozenset[int] = frozenset()
    """Ids that are not drawn at this place (min_tokens)."""

    def next_token(self, token_ids: list[int], output_ids: list[int]) -> int:
        """Depends on the whole sequence, so a wrong history shows."""
        value = 17 + self.choice + self.seed % VOCAB
        for token_id in token_ids:
            value = (value * 31 + token_id + 7) % VOCAB
        if self.penalised:
            value = (value + sum((token_id + 1) * (i + 1) for i, token_id in enumerate(sorted(output_ids)))) % VOCAB
        while value in self.banned:
            value = (value + 1) % VOCAB
        return value


def expected_tokens(
    prompt: list[int],
    count: int,
    choice: int = 0,
    *,
    seed: int = 0,
    penalised: bool = False,
    stops: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> list[int]:
    """A request's tokens; the first of ``stops`` from ``min_tokens`` on is the last one."""
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in stops):
        banned = stops if len(output) < min_tokens else frozenset()
        rule = Rule(choice, seed, penalised, banned)
        output.append(rule.next_token([*prompt, *output], output))
    return output


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
        self.outputs: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """What the rows count for penalties."""
        self.stop_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs

    def run(self, plan):
        """The step's writes; the token of each row of the plan, 0 where it draws none."""
        for row in plan.rows:
            if row.admitted:
                self._write_row(self.row_layout.views(self.batch.row_update(row)))
        bucket = self.buckets.select(plan.num_tokens, len(plan.rows), decode_only=plan.decode_only)
        fields = packed_layout(bucket, self.block_size).views(self.batch.pack(plan, bucket))
        for row, index, block in fields["table_deltas"]:
            if row < len(self.tables):
                self.tables[row, index] = block
        histories = [self._compute(fields, entry) for entry in range(len(plan.rows))]
        tokens = [self._draw(plan, fields, histories, entry) for entry in range(len(plan.rows))]
        for source, destination in plan.block_copies:
            self.pool[destination] = self.pool[source]
        return tokens

    def _write_row(self, fields):
        row = fields["row"][0]
        self.tables[row] = fields["block_table"]
        self.last_tokens[row] = 0
        known = fields["token_ids"][fields["num_prompt_tokens"][0] : fields["num_tokens"][0]]
        self.outputs[row] = known.tolist() if fields["uses_penalties"][0] else []
        self.stop_ids[row] = frozenset(fields["stop_ids"].tolist()) - {VOCAB}

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
        scheduled, row = plan.rows[entry], fields["rows"][entry]
        if not fields["samples"][entry]:
            return 0
        source = next(i for i, other in enumerate(plan.rows) if other is (scheduled.parent or scheduled))
        assert fields["logits_indices"][entry] == fields["query_start_loc"][source + 1] - 1
        history, request = histories[source], scheduled.request
        assert fields["positions"][entry] == len(history)
        known = request.token_ids[: len(history)]
        assert history[: len(known)] == known, f"KV of {request} holds another sequence"
        assert len(history) <= len(known) + 1, "at most one token may be unknown to the host"
        params = dict(zip(ROW_PARAMS, fields["params"][entry].tolist(), strict=True))
        floats = fields["params"][entry][:NUM_FLOAT_PARAMS].view(np.float32)
        rule = Rule(
            choice=params["choice"],
            seed=params["seed_low"] if floats[0] != 1.0 else 0,
            penalised=floats[ROW_PARAMS.index("presence_penalty")] != 0,
            banned=self.stop_ids[row] if fields["suppress_stop"][entry] else frozenset(),
        )
        token = rule.next_token(history, self.outputs[row])
        self.last_tokens[row] = token
        self.outputs[row].append(token)
        return token


@dataclass
class Handle:
    plan: SchedulerOutput
    number: int
    sampled: SampledRows


class FakeRunner:
    """The device behind the interface of ModelRunner. It runs each step when it is dispatched, so in order."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.num_steps = 0
        self.num_ahead = 0
        """Steps dispatched while the one before was unread."""
        self.num_draws = 0
        """Tokens drawn, whatever became of them."""
        self._unread: list[int] = []
        self.bad_rows: set[str] = set()
        self.last_plan: SchedulerOutput | None = None

    def dispatch(self, plan: SchedulerOutput) -> Handle:
        rows = plan.rows
        assert 0 < plan.num_tokens == sum(row.num_tokens for row in rows)
        assert len({row.request.row for row in rows}) == len(rows)
        for row in rows:
            assert row.request.row >= 0
        self.num_steps += 1
        self.num_draws += sum(row.samples for row in rows)
        self.num_ahead += bool(self._unread)
        self._unread.append(self.num_steps)
        assert len(self._unread) <= 2
        return Handle(plan, self.num_steps, self._sampled(plan, self.device.run(plan)))

    def resolve(self, handle: Handle) -> SampledRows:
        assert handle.number in self._unread
        self._unread = [number for number in self._unread if number > handle.number]
        self.last_plan = handle.plan
        return handle.sampled

    def forget(self) -> None:
        """The core has dropped a step that it does not need."""
        self._unread.clear()

    def _sampled(self, plan, tokens):
        count = len(plan.rows)
        token_ids = np.array(tokens, np.int32)
        sampled = SampledRows(
            token_ids=token_ids,
            finite=np.array([row.request.request_id not in self.bad_rows for row in plan.rows]),
            logprobs=-token_ids.astype(np.float32),
            ranks=token_ids % 7 + 1,
            top_token_ids=token_ids[:, None] + np.arange(20),
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


class Harness:
    """An EngineCore over a ``Device``; ``ahead`` is its option ``async_scheduling``."""

    def __init__(
        self, num_blocks=16, block_size=4, max_num_seqs=4, budget=16, max_model_len=40, caching=True, ahead=False
    ):
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len
        )
        self.device = Device(num_blocks, block_size, max_num_seqs, budget, max_model_len)
        self.runner = FakeRunner(self.device)
        self.core = EngineCore(self.scheduler, self.runner, async_scheduling=ahead)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.bad_rows = self.runner.bad_rows
        self.most_preemptions = 0

    @property
    def num_steps(self):
        return self.runner.num_steps

    def add(self, *args, **kwargs):
        self.scheduler.add_request(make_request(*args, **kwargs))

    def step(self):
        """One turn of the loop; the plan whose results it read."""
        if self.core._unread is not None and not self.core._unread.plan.is_live:
            self.runner.forget()
        self.runner.last_plan = None
        outputs = self.core.step()
        assert outputs.stats.num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        self.take(outputs.outputs)
        self.scheduler.check_integrity()
        for request in self.scheduler.requests:
            self.most_preemptions = max(self.most_preemptions, request.timing.num_preemptions)
        return self.runner.last_plan

    def take(self, outputs):
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.finished, f"{key} spoke after its end"
            self.outputs.setdefault(key, []).extend(output.token_ids)
            self.logprobs.setdefault(key, []).extend(output.logprobs or [])
            if output.finish_reason is not None:
                self.finished[key] = output.finish_reason.value

    def run(self, limit=2000):
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < limit, "no end in sight"
        assert self.kv.pool.num_free == self.kv.pool.num_usable
        return self.outputs
