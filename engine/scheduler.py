"""Who runs in the next step, with how many tokens, and what becomes of the results.

There are no prefill and decode modes. Every request has tokens and computed tokens, and a
step lets the computed ones catch up, within one token budget: a decode is a request that is
one token behind, a chunked prefill one that is many behind, a resumed one likewise.
"""

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from .admission import QueueLimits, check_fits
from .block_budget import MAX_PREEMPTIONS, headroom, keeps_promises, must_preempt
from .block_pool import Block
from .errors import RequestError
from .isolation import Isolation
from .kv_cache_manager import KVCacheManager
from .messages import AbortRequest, ChoiceOutput, EngineRequest, FinishReason
from .request import Request, RequestStatus, seed_stream
from .request_outputs import choice_output, sampled_logprobs, take_prompt_logprobs
from .request_queue import RequestQueue
from .scheduler_output import SampledRows, ScheduledRow, SchedulerOutput


class Scheduler:
    """First come, first served (or by priority), over one token budget; preemption frees blocks and recomputes.

    The first running request is never preempted for a later one, and alone it always fits
    (``check_fits``), so there is always progress. None is preempted more than ``MAX_PREEMPTIONS`` times.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        seed: int = 0,
        limits: QueueLimits | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.limits = limits or QueueLimits()
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        """By ``queue_key``: the most urgent and oldest first."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._choices: dict[str, OrderedDict[int, Request]] = {}
        """Live choices by request id."""
        self._forking: dict[str, list[Request]] = {}
        """Choices that wait for choice 0's prompt, by request id."""
        self._num_forking = 0
        self._ended: OrderedDict[tuple[str, int], tuple[int, int, list[bytes]]] = OrderedDict()
        """The last choices with stop strings that ended, as one may turn up in their text yet: tokens of prompt and
        output, keys of the output's blocks."""
        self.isolation = Isolation()
        self._seeds = seed_stream(seed)
        self._num_arrivals = 0
        self._num_promised = 0
        """Live choices that may not be preempted once more."""
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
        return len(self.waiting) + self._num_forking

    @property
    def requests(self) -> Iterator[Request]:
        """All live choices."""
        for choices in self._choices.values():
            yield from choices.values()

    def add_request(self, source: EngineRequest) -> None:
        """Queues all choices of a request. RequestError if it can never run, QueueFullError if too many wait."""
        if source.request_id in self._choices:
            raise RequestError(f"request id {source.request_id!r} is already in use", "request_id")
        check_fits(
            len(source.prompt_token_ids),
            source.sampling_params.max_tokens,
            max_model_len=self.max_model_len,
            block_size=self.kv.block_size,
            num_usable_blocks=self.kv.pool.num_usable,
        )
        num_open = len(self.running) + self.num_waiting
        self.limits.check(source, num_open, self.max_num_seqs, self.waiting.num_prompt_tokens)
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
            self._num_forking += len(others)
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
        num_prompt, num_made, keys = self._ended.pop((request_id, index), (0, 0, []))
        self.generation_tokens_total -= max(0, num_made - num_output_tokens)
        self.kv.unpublish(keys[(num_prompt % self.kv.block_size + num_output_tokens) // self.kv.block_size :])

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The only way out, from every state; a second call does nothing (rule R12)."""
        if request.finished:
            return
        was_running = request.status is RequestStatus.RUNNING
        was_forking = request.status is RequestStatus.FORKING
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.timing.finished_time_s = time.monotonic()
        self._num_promised -= request.timing.num_preemptions >= MAX_PREEMPTIONS
        if was_running:
            self.running.remove(request)
            self._release(request)
        elif was_forking:
            self._forking[request.request_id].remove(request)
            self._num_forking -= 1
        else:
            self.waiting.remove(request)
        if request.params.stop:
            keys = request.block_keys[request.num_prompt_tokens // self.kv.block_size :]
            self._ended[request.request_id, request.index] = request.num_prompt_tokens, request.num_output_tokens, keys
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
        suspect = self.isolation.suspect
        if ahead and (suspect is not None or must_preempt(self.kv, self.running, self.max_num_batched_tokens)):
            return None
        if suspect is not None:
            self._schedule_alone(plan, suspect)
        else:
            self._schedule_running(plan)
            if not plan.preempted:
                self._schedule_waiting(plan)
        self._schedule_forks(plan)
        for row in plan.rows:
            if row.num_tokens > 1:  # else there is nothing new that the next update will not see
                self._publish(row.request)
        if plan.rows:
            plan.chunk_copies = self.kv.take_chunk_copies()
            return plan
        assert ahead or not self.has_work, "work exists, but nothing was scheduled (rule R11)"
        return None

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        index, block_size = 0, self.kv.block_size
        while index < len(self.running):
            request = self.running[index]
            index += 1
            count = min(request.num_new_tokens, self.max_num_batched_tokens - plan.num_tokens)
            if count <= 0:
                continue
            added: Sequence[Block] | None = ()
            if request.num_computed_tokens + count > len(request.blocks) * block_size:
                added = self._allocate_or_preempt(request, count, plan)
                if added is None:
                    return
            self._plan_row(plan, request, count, added or (), admitted=False)

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
            if not self._admit(plan, self.waiting.first()):
                return

    def _admit(self, plan: SchedulerOutput, request: Request) -> bool:
        """Lets a waiting request run; False, with nothing changed, if there are too few blocks for it."""
        if self._num_promised and not keeps_promises(self.kv, self.running, request):
            return False
        cached = self.kv.find_cached_blocks(request)
        num_cached = len(cached) * self.kv.block_size
        count = min(request.num_tokens - num_cached, self.max_num_batched_tokens - plan.num_tokens)
        room = headroom(self.kv, self.running, request, num_cached + count)
        added = self.kv.allocate_slots(request, count, cached, headroom=room)
        if added is None:
            return False
        self.waiting.remove(request)
        self.kv.count_lookup(request.num_tokens, num_cached)
        if request.admissions == 0:
            request.num_cached_tokens = num_cached
            request.timing.first_scheduled_time_s = time.monotonic()
        request.admissions += 1
        request.num_computed_tokens = num_cached
        request.num_published_blocks = len(cached)
        self._run(request)
        self._plan_row(plan, request, count, added, admitted=True)
        return True

    def _schedule_alone(self, plan: SchedulerOutput, suspect: Request) -> None:
        """Only ``suspect`` runs: it was in a step that failed. Those cleared before it wait until that is over."""
        for request in [request for request in self.running if request is not suspect]:
            self._set_aside(request)
        if suspect.status is RequestStatus.RUNNING:
            self._schedule_running(plan)
        else:
            self._admit(plan, suspect)

    def _schedule_forks(self, plan: SchedulerOutput) -> None:
        """Lets the other choices of a request whose prompt this step completes sample from its logits."""
        for row in list(plan.rows) if self._forking else ():
            siblings = self._forking.get(row.request.request_id)
            if not siblings or row.request.index != 0 or not row.samples:
                continue
            while siblings and self._free_rows and self.isolation.suspect is None:
                if self._num_promised and not keeps_promises(self.kv, self.running, siblings[0]):
                    break
                copy = self.kv.fork(row.request, siblings[0])
                if copy is None:
                    break
                child = siblings.pop(0)
                self._num_forking -= 1
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
        self, plan: SchedulerOutput, request: Request, count: int, added: Sequence[Block], *, admitted: bool
    ) -> ScheduledRow:
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + count
        samples = end == len(request.token_ids) + request.num_output_placeholders
        new_block_ids = [block.block_id for block in added] if added else ()
        row = ScheduledRow(request, start, count, admitted, new_block_ids, samples)
        plan.rows.append(row)
        plan.num_tokens += count
        if samples:
            request.num_output_placeholders += 1
        if start < request.num_prompt_tokens:
            self.prompt_tokens_computed_total += min(count, request.num_prompt_tokens - start)
        return row

    # ---- the results ------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, sampled: SampledRows) -> list[ChoiceOutput]:
        """Takes in a step's results: new tokens, ends. Requests that ended meanwhile are passed over."""
        now, running = time.monotonic(), RequestStatus.RUNNING
        token_ids, finite = sampled.token_ids.tolist(), sampled.finite.tolist()
        outputs: list[ChoiceOutput] = []
        for entry, row in enumerate(plan.rows):
            request = row.request
            if request.status is not running:
                continue
            if not finite[entry]:
                self.finish(request, FinishReason.ERROR)
                self.kv.unpublish(request.block_keys[row.start // self.kv.block_size :])
                outputs.append(choice_output(request, [], error="the model produced logits that are not finite"))
                continue
            if entry in sampled.prompt_logprobs:
                take_prompt_logprobs(request, sampled, entry)
            if row.samples:
                self._take_token(request, token_ids[entry], now)
                logprobs = None
                if request.params.logprobs is not None:
                    logprobs = [sampled_logprobs(sampled, entry, request.params.logprobs)]
                outputs.append(choice_output(request, [token_ids[entry]], logprobs))
        return outputs

    def _take_token(self, request: Request, token_id: int, now: float) -> None:
        request.token_ids.append(token_id)
        request.num_output_placeholders -= 1
        request.suspected = False
        self.generation_tokens_total += 1
        timing = request.timing
        timing.last_token_time_s = now
        if not timing.first_token_time_s:
            timing.first_token_time_s = now
        source = request.source
        if token_id in source.stop_token_ids and request.num_output_tokens > request.params.min_tokens:
            self.finish(request, FinishReason.STOP, None if token_id in source.eos_token_ids else token_id)
        elif len(request.token_ids) >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)
        else:
            self._publish(request)

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
        if request.num_computed_tokens >= (request.num_published_blocks + 1) * self.kv.block_size:
            self.kv.publish(request)

    def _preempt(self, request: Request) -> None:
        self._set_aside(request)
        request.timing.num_preemptions += 1
        self.num_preemptions_total += 1
        self._num_promised += request.timing.num_preemptions == MAX_PREEMPTIONS

    def _set_aside(self, request: Request) -> None:
        """Back to the front of its class; what the cache still has when it resumes is not recomputed."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        self.waiting.push(request)

    def recover(self, lost: Iterable[SchedulerOutput]) -> list[ChoiceOutput]:
        """After steps that failed and cost the device its state: all running requests wait again, with their tokens.

        Gives the end of the request that is to blame, if it is known. Raises UnexplainedFailureError.
        """
        culprit = self.isolation.judge(lost)
        for request in list(self.running):
            self._set_aside(request)
        self.kv.reset_cache()
        if culprit is None:
            return []
        self.finish(culprit, FinishReason.ERROR)
        return [choice_output(culprit, [], error="the engine's steps fail whenever this request runs")]

    def _release_forks(self, request_id: str) -> None:
        """Choices that could not fork become ordinary waiting requests; the prefix cache, if on, has their prompt."""
        for choice in reversed(self._forking.pop(request_id, [])):
            self._num_forking -= 1
            choice.status = RequestStatus.WAITING
            self.waiting.push(choice)

    def check_integrity(self) -> None:
        """Asserts that rows, queues and blocks add up (rules R12 and R13)."""
        self.kv.check_integrity(self.requests)
        rows = [request.row for request in self.running]
        assert sorted([*rows, *self._free_rows]) == list(range(self.max_num_seqs)), "rows are lost or shared"
        forking = [choice for choices in self._forking.values() for choice in choices]
        assert len(forking) == self._num_forking
        live = {id(request) for request in self.requests}
        assert live == {id(request) for request in [*self.waiting, *self.running, *forking]}
        assert all(not request.blocks for request in [*self.waiting, *forking])
