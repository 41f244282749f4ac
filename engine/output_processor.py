"""The core's news per step turned into results per request: text, stop strings, logprobs and statistics.

Streaming or not makes no difference here: every kind of output is put together from the same
news of each choice (rule R7). Not thread-safe: one thread owns an OutputProcessor.
"""

import time
from dataclasses import dataclass, field
from itertools import repeat

from .choice_stream import ChoiceStream, prompt_logprobs
from .errors import QueueFullError, RequestError
from .messages import AbortRequest, ChoiceOutput, EngineRequest, ErrorKind, FinishReason, RequestTiming, StepOutputs
from .metrics import FinishedRequest, StatSink
from .outputs import CompletionOutput, RequestOutput, TokenLogprobs
from .sampling_params import OutputKind
from .tokenizer import Tokenizer


@dataclass(slots=True)
class ProcessedOutputs:
    """``aborts`` are choices that a stop string ended, for the core to stop as well."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[AbortRequest] = field(default_factory=list)
    refusals: dict[str, RequestError | QueueFullError] = field(default_factory=dict)
    """By request id: requests that the core did not take. They have no output and are not counted as finished."""


@dataclass(slots=True)
class _Choice:
    stream: ChoiceStream
    output: CompletionOutput
    """All so far; not used with ``OutputKind.DELTA`` but for the reasons of its end."""
    first_token_time_s: float = 0.0
    last_token_time_s: float = 0.0


class OutputProcessor:
    """Keeps what it needs of every unfinished request, and nothing of a finished one.

    ``tokenizer`` None: no text is made (``skip_tokenizer_init``).
    """

    def __init__(self, tokenizer: Tokenizer | None, stat_sink: StatSink) -> None:
        self._tokenizer = tokenizer
        self._sink = stat_sink
        self._requests: dict[str, _RequestState] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add_request(self, request: EngineRequest, prompt: str | None) -> None:
        """Expects outputs for ``request``; ``prompt`` is its text, if there is one, for the caller.

        Raises ValueError for an id that is in use, RequestError for stop strings without a tokenizer.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if self._tokenizer is None and request.sampling_params.stop:
            raise RequestError("stop strings need a tokenizer", "stop")
        self._requests[request.request_id] = _RequestState(self._tokenizer, self._sink, request, prompt)

    def process(self, outputs: StepOutputs) -> ProcessedOutputs:
        """One step's news. News of requests and choices that are unknown or finished are ignored."""
        self._sink.record_step(outputs.stats)
        result = ProcessedOutputs()
        now_s = time.monotonic()
        touched: dict[str, _RequestState] = {}
        for news in outputs.outputs:
            state = self._requests.get(news.request_id)
            if state is None:
                continue
            if news.error_kind in (ErrorKind.INVALID, ErrorKind.OVERLOADED):
                del self._requests[news.request_id]
                result.refusals[news.request_id] = _refusal(news)
                continue
            touched[news.request_id] = state
            if state.take(news, now_s):
                result.aborts.append(state.stop_abort(news.index))
        for state in touched.values():
            output = self._collect(state, now_s)
            if output is not None:
                result.request_outputs.append(output)
        return result

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request here; the core has to be told too. None when the id is unknown or finished."""
        return self._end(request_id, FinishReason.ABORT, None)

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """Ends every request with FinishReason.ERROR; ``stop_reason`` is the error's text."""
        outputs = (self._end(request_id, FinishReason.ERROR, str(error)) for request_id in list(self._requests))
        return [output for output in outputs if output is not None]

    def _end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> RequestOutput | None:
        state = self._requests.get(request_id)
        if state is None:
            return None
        for choice in state.choices:
            if not choice.output.finished:
                state.finish(choice, reason, stop_reason)
        return self._collect(state, time.monotonic())

    def _collect(self, state: "_RequestState", now_s: float) -> RequestOutput | None:
        output = state.collect(now_s)
        if state.finished:
            del self._requests[state.request.request_id]
            self._sink.record_finished(state.statistics(now_s))
        return output


class _RequestState:
    """One unfinished request with all its choices."""

    def __init__(self, tokenizer: Tokenizer | None, sink: StatSink, request: EngineRequest, prompt: str | None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._sink = sink
        self._prompt = prompt
        params = request.sampling_params
        self._kind = params.output_kind
        self._stop_ids = tokenizer.stop_ids_for(params.stop or ()) if tokenizer is not None else {}
        self.choices = [
            _Choice(
                ChoiceStream(tokenizer, request, self._stop_ids),
                CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else []),
            )
            for index in range(params.n)
        ]
        self._reported = [False] * params.n  # with DELTA: the choice's end has gone out
        self._num_unfinished = params.n
        self._last_reason = FinishReason.ABORT
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._first_token_time_s = 0.0
        self._timing = RequestTiming(arrival_time_s=request.arrival_time_s)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def take(self, news: ChoiceOutput, now_s: float) -> bool:
        """One choice's news; True when a stop string ended the choice before the core did."""
        if not 0 <= news.index < len(self.choices) or self.choices[news.index].output.finished:
            return False
        choice = self.choices[news.index]
        params = self.request.sampling_params
        if news.index == 0:
            # Choices that run later find choice 0's prompt in the cache, which says nothing about the request.
            self._num_cached_tokens = max(self._num_cached_tokens, news.num_cached_tokens)
        if news.timing is not None:
            self._timing = _span(self._timing, news.timing)
        if news.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(
                self._tokenizer, self.request.prompt_token_ids, news.prompt_logprobs, params
            )
        if news.token_ids:
            self._record_tokens(choice, len(news.token_ids), now_s)
        found = self._push_tokens(choice, news)
        if found is not None:
            self.finish(choice, FinishReason.STOP, found)
            return news.finish_reason is None
        if news.finish_reason is not None:
            self.finish(choice, news.finish_reason, self._stop_reason(news))
        return False

    def _push_tokens(self, choice: _Choice, news: ChoiceOutput) -> str | None:
        """The stop string found, if any; tokens after it are dropped."""
        sampled = news.logprobs or repeat(None, len(news.token_ids))
        last = len(news.token_ids) - 1
        for place, (token_id, logprobs) in enumerate(zip(news.token_ids, sampled, strict=True)):
            is_end = place == last and news.finish_reason is FinishReason.STOP
            if is_end and token_id in self.request.stop_token_ids:
                choice.stream.push_stop_token(token_id, logprobs)
                continue
            found = choice.stream.push(token_id, logprobs)
            if found is not None:
                return found
        return None

    def _stop_reason(self, news: ChoiceOutput) -> int | str | None:
        if news.finish_reason is FinishReason.ERROR:
            return news.error or news.stop_reason
        if isinstance(news.stop_reason, int):
            return self._stop_ids.get(news.stop_reason, news.stop_reason)
        return news.stop_reason

    def _record_tokens(self, choice: _Choice, count: int, now_s: float) -> None:
        if not self._first_token_time_s:
            self._first_token_time_s = now_s
            self._sink.record_first_token(now_s - self.request.arrival_time_s)
        if not choice.first_token_time_s:
            choice.first_token_time_s = choice.last_token_time_s = now_s
            count -= 1
        for _ in range(count):
            self._sink.record_inter_token((now_s - choice.last_token_time_s) / count)
        choice.last_token_time_s = now_s

    def finish(self, choice: _Choice, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends one choice and lets out what it held back; the choice must not be finished."""
        choice.output.finish_reason = reason
        choice.output.stop_reason = stop_reason
        self._num_unfinished -= 1
        self._last_reason = reason
        choice.stream.finish()

    def stop_abort(self, index: int) -> AbortRequest:
        """Tells the core that a stop string ended a choice; the tokens it makes meanwhile do not count."""
        return AbortRequest(
            request_id=self.request.request_id,
            index=index,
            reason=FinishReason.STOP,
            num_output_tokens=self.choices[index].stream.num_tokens,
        )

    def collect(self, now_s: float) -> RequestOutput | None:
        """What is to go out now, or None when there is nothing new to show."""
        if self._kind is OutputKind.DELTA:
            outputs = [output for choice in self.choices if (output := self._delta(choice)) is not None]
        else:
            changed = False
            for choice in self.choices:
                changed |= self._accumulate(choice)
            show = self.finished or (changed and self._kind is OutputKind.CUMULATIVE)
            outputs = [_copy(choice.output) for choice in self.choices] if show else []
        if not outputs:
            return None
        shown = self._prompt_logprobs
        if self._kind is OutputKind.DELTA:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=shown,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics(now_s) if self.finished else None,
        )

    def _delta(self, choice: _Choice) -> CompletionOutput | None:
        index, ended = choice.output.index, choice.output.finished
        if self._reported[index] or not (ended or choice.stream.has_news()):
            return None
        self._reported[index] = ended
        news = choice.stream.take_news()
        return CompletionOutput(
            index=index,
            text=news.text,
            token_ids=news.token_ids,
            cumulative_logprob=choice.stream.cumulative_logprob,
            logprobs=news.logprobs,
            finish_reason=choice.output.finish_reason,
            stop_reason=choice.output.stop_reason,
        )

    def _accumulate(self, choice: _Choice) -> bool:
        output = choice.output
        ended = output.finished and not self._reported[output.index]
        if not (ended or choice.stream.has_news()):
            return False
        self._reported[output.index] = output.finished
        news = choice.stream.take_news()
        output.text += news.text
        output.token_ids += news.token_ids
        if output.logprobs is not None:
            output.logprobs += news.logprobs or []
        output.cumulative_logprob = choice.stream.cumulative_logprob
        return True

    def _metrics(self, now_s: float) -> RequestTiming:
        """The core's times where it sent them, else those seen here."""
        timing = self._timing
        timing.arrival_time_s = self.request.arrival_time_s
        timing.first_token_time_s = timing.first_token_time_s or self._first_token_time_s
        timing.last_token_time_s = timing.last_token_time_s or max(c.last_token_time_s for c in self.choices)
        timing.finished_time_s = timing.finished_time_s or now_s
        return timing

    def statistics(self, now_s: float) -> FinishedRequest:
        arrival_s, first_s = self.request.arrival_time_s, self._first_token_time_s
        scheduled_s = self._timing.first_scheduled_time_s
        gaps = sum(max(0, choice.stream.num_tokens - 1) for choice in self.choices)
        decode_s = sum(choice.last_token_time_s - choice.first_token_time_s for choice in self.choices)
        params = self.request.sampling_params
        return FinishedRequest(
            request_id=self.request.request_id,
            finish_reason=self._last_reason,
            n=params.n,
            max_tokens=params.max_tokens,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=sum(choice.stream.num_tokens for choice in self.choices),
            max_num_generation_tokens=max(choice.stream.num_tokens for choice in self.choices),
            num_preemptions=self._timing.num_preemptions,
            e2e_latency_s=now_s - arrival_s,
            queue_time_s=scheduled_s - arrival_s if scheduled_s else 0.0,
            prefill_time_s=first_s - (scheduled_s or arrival_s) if first_s else 0.0,
            decode_time_s=max(choice.last_token_time_s for choice in self.choices) - first_s if first_s else 0.0,
            time_to_first_token_s=first_s - arrival_s if first_s else None,
            time_per_output_token_s=decode_s / gaps if gaps else None,
        )


def _refusal(news: ChoiceOutput) -> RequestError | QueueFullError:
    text = news.error or "the request was refused"
    return QueueFullError(text) if news.error_kind is ErrorKind.OVERLOADED else RequestError(text, news.error_param)


def _span(one: RequestTiming, other: RequestTiming) -> RequestTiming:
    """The times of a request from those of its choices, which need not run together: first starts and last ends."""

    def first(a_s: float, b_s: float) -> float:
        return min(a_s, b_s) if a_s and b_s else a_s or b_s

    return RequestTiming(
        arrival_time_s=one.arrival_time_s or other.arrival_time_s,
        first_scheduled_time_s=first(one.first_scheduled_time_s, other.first_scheduled_time_s),
        first_token_time_s=first(one.first_token_time_s, other.first_token_time_s),
        last_token_time_s=max(one.last_token_time_s, other.last_token_time_s),
        finished_time_s=max(one.finished_time_s, other.finished_time_s),
        num_preemptions=max(one.num_preemptions, other.num_preemptions),
    )


def _copy(output: CompletionOutput) -> CompletionOutput:
    """The caller's own: later steps do not change it."""
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else list(output.logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
