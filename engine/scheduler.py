"""Who runs in the next step, with how many tokens, and what becomes of the results.

There are no prefill and decode modes. Every request has tokens and computed tokens, and a
step lets the computed ones catch up, within one token budget: a decode is a request that is
one token behind, a chunked prefill one that is many behind, a resumed one likewise.
"""

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from .admission import check_fits
from .block_pool import Block
from .errors import RequestError
from .kv_cache_manager import KVCacheManager
from .messages import AbortRequest, ChoiceOutput, EngineRequest, FinishReason
from .request import Request, RequestStatus
from .request_outputs import choice_output, sampled_logprobs
from .request_queue import make_queue
from .scheduler_output import SampledRows, ScheduledRow, SchedulerOutput


class Scheduler:
    """First come, first served (or by priority), over one token budget; preemption frees blocks and recomputes.

    The first running request is never preempted for a later one, and alone it always fits
    (``check_admissible``), so there is always progress.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        seed: int = 0,
        policy: str = "fcfs",
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting = make_queue(policy)
        self.running: list[Request] = []
        """By ``queue_key``: the most urgent and oldest first."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._choices: dict[str, OrderedDict[int, Request]] = {}
        """Live choices by request id."""
        self._forking: dict[str, list[Request]] = {}
        """Choices that wait for choice 0's prompt, by request id."""
        self._ended: OrderedDict[tuple[str, int], Request] = OrderedDict()
        """The last choices with stop strings that ended here: one may turn up in their text yet."""
        self._seeds = _seed_stream(seed)
        self._num_arrivals = 0
        self.num_preemptions_total = 0
        self.prompt_tokens_total = 0
        self.prompt_tokens_computed_total = 0
        self.generation_tokens_total = 0

    # ---- in and out -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self._forking.values()))

    @property
    def requests(self) -> Iterator[Request]:
        """All live choices."""
        for choices in self._choices.values():
            yield from choices.values()

    def check_admissible(self, source: EngineRequest) -> None:
        """Refuses what can never run (rule R10)."""
        check_fits(
            len(source.prompt_token_ids),
            source.sampling_params.max_tokens,
            max_model_len=self.max_model_len,
            block_size=self.kv.block_size,
            num_usable_blocks=self.kv.pool.num_usable,
        )

    def add_request(self, source: EngineRequest) -> None:
        """Queues all choices of a request. Raises RequestError when it can never run or its id is in use."""
        if source.request_id in self._choices:
            raise RequestError(f"request id {source.request_id!r} is already in use", "request_id")
        self.check_admissible(source)
        base = source.sampling_params.seed
        base = next(self._seeds) if base is None else base & (2**64 - 1)
        self._num_arrivals += 1
        choices = OrderedDict(
            (i, Request(source, i, base, self._num_arrivals)) for i in range(source.sampling_params.n)
        )
        self._choices[source.request_id] = choices
        first, *others = choices.values()
        self.waiting.push(first)
        if others:
            self._forking[source.request_id] = others
            for choice in others:
                choice.status = RequestStatus.FORKING
        self.prompt_tokens_total += first.num_prompt_tokens

    def abort(self, abort: AbortRequest) -> list[ChoiceOutput]:
        """Ends a request or one choice of it, whatever state it is in; unknown ids give nothing."""
        choices = self._choices.get(abort.request_id, OrderedDict[int, Request]())
        doomed = [c for c in choices.values() if abort.index is None or c.index == abort.index]
        outputs = []
        for request in doomed:
            self.finish(request, abort.reason)
            outputs.append(choice_output(request, []))
        if abort.index is not None and abort.num_output_tokens is not None:
            self._take_back(abort.request_id, abort.index, abort.num_output_tokens)
        return outputs

    def _take_back(self, request_id: str, index: int, num_output_tokens: int) -> None:
        """Tokens past a stop string are neither counted nor left in the prefix cache."""
        request = self._ended.pop((request_id, index), None)
        if request is not None:
            self.generation_tokens_total -= max(0, request.num_output_tokens - num_output_tokens)
            self.kv.unpublish(request, request.num_prompt_tokens + num_output_tokens)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The only way out, from every state; a second call does nothing (rule R12)."""
        if request.finished:
            return
        was_running = request.status is RequestStatus.RUNNING
        was_forking = request.status is RequestStatus.FORKING
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.timing.finished_time_s = time.monotonic()
        if was_running:
            self.running.remove(request)
            self._release(request)
        elif was_forking:
            self._forking[request.request_id].remove(request)
        else:
            self.waiting.remove(request)
        if request.params.stop:
            self._ended[request.request_id, request.index] = request
            if len(self._ended) > 4 * self.max_num_seqs:
                self._ended.popitem(last=False)
        choices = self._choices[request.request_id]
        del choices[request.index]
        if request.index == 0 or not choices:
            self._release_forks(request.request_id)
        if not choices:
            del self._choices[request.request_id]

    # ---- the plan ---------------------------------------------------------------------------

    def schedule(self, *, ahead: bool = False) -> SchedulerOutput | None:
        """The next step: running requests first, oldest first, then admissions while budget, rows and blocks last.

        It counts as computed from here on. ``ahead``: an earlier step's results are not known yet; then nobody is
        preempted, and None means that they must be read before more can be planned.
        """
        plan = SchedulerOutput()
        if ahead and self._must_preempt():
            return None
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        self._schedule_forks(plan)
        for row in plan.rows:
            self._publish(row.request)
        if plan.rows:
            plan.chunk_copies = self.kv.take_chunk_copies()
            return plan
        assert ahead or not self.has_work, "work exists, but nothing was scheduled (rule R11)"
        return None

    def _must_preempt(self) -> bool:
        """The free blocks do not suffice for all that run."""
        block_size, budget = self.kv.block_size, self.max_num_batched_tokens
        if self.kv.pool.num_free >= len(self.running) + budget // block_size:
            return False  # each row needs one block at most besides the full ones of the budget
        needed = 0
        for request in self.running:
            count = min(request.num_new_tokens, budget)
            budget -= count
            needed += max(0, self.kv.blocks_for(request.num_computed_tokens + count) - len(request.blocks))
        return needed > self.kv.pool.num_free

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = min(request.num_new_tokens, self.max_num_batched_tokens - plan.num_tokens)
            if count > 0:
                added = self._allocate_or_preempt(request, count, plan)
                if added is None:
                    return
                self._plan_row(plan, request, count, added, admitted=False)
            index += 1

    def _allocate_or_preempt(self, request: Request, count: int, plan: SchedulerOutput) -> list[Block] | None:
        """Blocks for a running request, at the expense of the youngest others; None if it had to go itself."""
        while (added := self.kv.allocate_slots(request, count)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return None
        return added

    def _schedule_waiting(self, plan: SchedulerOutput) -> None:
        while self.waiting and self._free_rows and plan.num_tokens < self.max_num_batched_tokens:
            request = self.waiting.first()
            cached = self.kv.find_cached_blocks(request)
            num_cached = len(cached) * self.kv.block_size
            count = min(request.num_tokens - num_cached, self.max_num_batched_tokens - plan.num_tokens)
            added = self.kv.allocate_slots(request, count, cached, headroom=self._headroom(request, num_cached + count))
            if added is None:
                return
            self.waiting.pop()
            self.kv.count_lookup(request.num_tokens, num_cached)
            if request.admissions == 0:
                request.num_cached_tokens = num_cached
                request.timing.first_scheduled_time_s = time.monotonic()
            request.admissions += 1
            request.num_computed_tokens = num_cached
            request.num_published_blocks = len(cached)
            self._run(request)
            self._plan_row(plan, request, count, added, admitted=True)

    def _headroom(self, request: Request, num_tokens: int) -> int:
        """Blocks to leave free at an admission: the rest of the prompt, and after a preemption one per running request.

        Without it a long prompt starts into a full pool only to be thrown out again, and a
        preempted request comes back one step later to be preempted again.
        """
        rest = self.kv.blocks_for(request.num_tokens) - self.kv.blocks_for(num_tokens)
        if self.running and request.admissions > 0:
            rest += len(self.running)
        return rest if self.running else 0

    def _schedule_forks(self, plan: SchedulerOutput) -> None:
        """Lets the other choices of a request whose prompt this step completes sample from its logits."""
        for row in list(plan.rows) if self._forking else ():
            siblings = self._forking.get(row.request.request_id)
            if not siblings or row.request.index != 0 or not row.samples:
                continue
            while siblings and self._free_rows:
                copy = self.kv.fork(row.request, siblings[0])
                if copy is None:
                    break
                child = siblings.pop(0)
                child.num_cached_tokens = row.request.num_cached_tokens
                child.timing.first_scheduled_time_s = row.request.timing.first_scheduled_time_s
                child.admissions = 1
                self._run(child)
                fork = self._plan_row(plan, child, 0, child.blocks, admitted=True)
                fork.parent, fork.samples = row, True
                if copy[0] is not copy[1]:
                    plan.block_copies.append((copy[0].block_id, copy[1].block_id))
            self._release_forks(row.request.request_id)

    def _plan_row(
        self, plan: SchedulerOutput, request: Request, count: int, added: list[Block], *, admitted: bool
    ) -> ScheduledRow:
        start = request.num_computed_tokens
        row = ScheduledRow(
            request=request,
            start=start,
            num_tokens=count,
            admitted=admitted,
            new_block_ids=[block.block_id for block in added],
            samples=start + count == request.num_tokens + request.num_output_placeholders,
        )
        plan.rows.append(row)
        plan.num_tokens += count
        request.num_computed_tokens = start + count
        request.num_output_placeholders += row.samples
        if start < request.num_prompt_tokens:
            self.prompt_tokens_computed_total += min(count, request.num_prompt_tokens - start)
        return row

    # ---- the results ------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, sampled: SampledRows) -> list[ChoiceOutput]:
        """Takes in a step's results: new tokens, ends. Requests that ended meanwhile are passed over."""
        now = time.monotonic()
        outputs: list[ChoiceOutput] = []
        for entry, row in enumerate(plan.rows):
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue
            if not sampled.finite[entry]:
                self.finish(request, FinishReason.ERROR)
                self.kv.unpublish(request, row.start)
                outputs.append(choice_output(request, [], error="the model produced logits that are not finite"))
                continue
            if entry in sampled.prompt_logprobs:
                _take_prompt_logprobs(request, sampled, entry)
            if row.samples:
                outputs.append(self._take_token(request, sampled, entry, now))
        return outputs

    def _take_token(self, request: Request, sampled: SampledRows, entry: int, now: float) -> ChoiceOutput:
        token_id = int(sampled.token_ids[entry])
        request.token_ids.append(token_id)
        request.num_output_placeholders -= 1
        self.generation_tokens_total += 1
        if not request.timing.first_token_time_s:
            request.timing.first_token_time_s = now
        request.timing.last_token_time_s = now
        self._check_stop(request, token_id)
        if not request.finished:
            self._publish(request)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [sampled_logprobs(sampled, entry, request.params.logprobs)]
        return choice_output(request, [token_id], logprobs)

    def _check_stop(self, request: Request, token_id: int) -> None:
        source = request.source
        if token_id in source.stop_token_ids and request.num_output_tokens > request.params.min_tokens:
            self.finish(request, FinishReason.STOP, None if token_id in source.eos_token_ids else token_id)
        elif request.num_tokens >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    # ---- moves ------------------------------------------------------------------------------

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        insort(self.running, request, key=attrgetter("queue_key"))

    def _release(self, request: Request) -> None:
        self._free_rows.append(request.row)
        request.row = -1
        self.kv.free(request)
        request.num_computed_tokens = request.num_output_placeholders = 0

    def _publish(self, request: Request) -> None:
        """Offers blocks that have become full to the prefix cache: their KV is there before any later step runs."""
        num_known = min(request.num_computed_tokens, request.num_tokens)
        if num_known >= (request.num_published_blocks + 1) * self.kv.block_size:
            self.kv.publish(request)

    def _preempt(self, request: Request) -> None:
        """Back to the front of its class; what the cache still has when it resumes is not recomputed."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.timing.num_preemptions += 1
        self.num_preemptions_total += 1
        self.waiting.requeue(request)

    def _release_forks(self, request_id: str) -> None:
        """Choices that could not fork become ordinary waiting requests; the prefix cache, if on, has their prompt."""
        for choice in reversed(self._forking.pop(request_id, [])):
            choice.status = RequestStatus.WAITING
            self.waiting.requeue(choice)

    def check_integrity(self) -> None:
        """Asserts that rows, queues and blocks add up (rules R12 and R13)."""
        self.kv.check_integrity(self.requests)
        rows = [request.row for request in self.running]
        assert sorted([*rows, *self._free_rows]) == list(range(self.max_num_seqs)), "rows are lost or shared"
        forking = [choice for choices in self._forking.values() for choice in choices]
        live = {id(request) for request in self.requests}
        assert live == {id(request) for request in [*self.waiting, *self.running, *forking]}
        assert all(not request.blocks for request in [*self.waiting, *forking])


def _take_prompt_logprobs(request: Request, sampled: SampledRows, entry: int) -> None:
    """Appends the positions that are new; after a preemption some are computed a second time."""
    part = sampled.prompt_logprobs[entry]
    top = request.params.prompt_logprobs or 0
    for offset in range(len(part.token_ids)):
        if part.first + offset == len(request.prompt_logprobs) + 1:
            request.prompt_logprobs.append(sampled_logprobs(part, offset, top))


def _seed_stream(seed: int) -> Iterator[int]:
    """64-bit seeds for requests that give none: splitmix64 from the engine's seed."""
    state = seed & (2**64 - 1)
    while True:
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        yield z ^ (z >> 31)
