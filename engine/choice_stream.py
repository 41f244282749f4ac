"""One choice's way from token ids to what its caller gets: text, ids and logprobs that agree (rules R6, R7)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .detokenizer import IncrementalDetokenizer, create_detokenizer
from .messages import EngineRequest, SampledLogprobs
from .outputs import Logprob, TokenLogprobs
from .sampling_params import SamplingParams
from .stop_strings import StopMatcher
from .tokenizer import Tokenizer


@dataclass(slots=True)
class _Token:
    """A token that has not gone out yet; ``start`` and ``end`` are places in the choice's text."""

    token_id: int
    start: int
    end: int
    due: int
    """Characters that must have gone out before it may."""
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class News:
    """What may go out and has not yet. The texts of its tokens' logprobs, joined over all news, are the text."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class ChoiceStream:
    """Turns a choice's ids into news: ids -> bytes -> complete UTF-8 -> stop strings -> text.

    A token goes out together with the last character of its text, so that a stop string found
    later never has to take back a token's text. With ``detokenize`` off, or without a tokenizer,
    there is no text and tokens go out at once.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: EngineRequest, stop_ids: dict[int, str]) -> None:
        params = request.sampling_params
        self._params = params
        self._stop_ids = stop_ids  # ids that stand for a stop string
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = create_detokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._waiting: deque[_Token] = deque()
        self._made_chars = 0  # of text made, held back or not
        self._sent_chars = 0  # of text gone out
        self._news = News("", [], None if params.logprobs is None else [])
        self._stopped = False
        self.num_tokens = 0
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0

    def push(self, token_id: int, sampled: SampledLogprobs | None) -> str | None:
        """Takes one token; gives the stop string that it completed, or None. After one the choice is over."""
        self.num_tokens += 1
        detokenizer = self._detokenizer
        others = self._describe(sampled)
        text = "" if detokenizer is None else detokenizer.push(token_id)
        self._append(token_id, text, sampled, others, pending=detokenizer is not None and detokenizer.pending)
        return self._send(text)

    def push_stop_token(self, token_id: int, sampled: SampledLogprobs | None) -> None:
        """Takes the id that ends the choice: its text is no part of the answer, unless asked for."""
        self.num_tokens += 1
        self._flush_tail()
        others = self._describe(sampled)
        text = ""
        if self._detokenizer is not None and self._params.include_stop_str_in_output:
            text = self._stop_ids.get(token_id) or self._detokenizer.push(token_id)
        self._append(token_id, text, sampled, others)
        self._release(self._matcher.flush() + text if self._matcher else text)

    def finish(self) -> None:
        """The choice is over: everything held back goes out, unless a stop string was found."""
        if self._stopped:
            return
        self._flush_tail()
        if self._matcher is not None:
            self._release(self._matcher.flush())
        self._deliver(everything=True)

    def has_news(self) -> bool:
        """True when there is text to show, or a token where no text is made."""
        return bool(self._news.text or (self._detokenizer is None and self._news.token_ids))

    def take_news(self) -> News:
        news = self._news
        self._news = News("", [], None if news.logprobs is None else [])
        return news

    def _describe(self, sampled: SampledLogprobs | None) -> TokenLogprobs:
        """The best tokens at this place; has to be called before the chosen token is pushed."""
        limit = self._params.logprobs
        if sampled is None or limit is None:
            return {}
        return describe_top(self._tokenizer, self._detokenizer, sampled, limit)

    def _append(
        self,
        token_id: int,
        text: str,
        sampled: SampledLogprobs | None,
        others: TokenLogprobs,
        *,
        pending: bool = False,
    ) -> None:
        logprobs: TokenLogprobs | None = None
        if sampled is not None and self.cumulative_logprob is not None:
            self.cumulative_logprob += sampled.logprob
            shown = None if self._detokenizer is None else text
            others.pop(token_id, None)
            logprobs = {token_id: Logprob(sampled.logprob, sampled.rank, shown), **others}
        start = self._made_chars
        self._made_chars += len(text)
        due = self._made_chars + 1 if pending else self._made_chars
        self._waiting.append(_Token(token_id, start, self._made_chars, due, logprobs))

    def _send(self, text: str) -> str | None:
        """Text through the stop strings; those do not look at the first ``min_tokens`` tokens."""
        if self._matcher is None or self.num_tokens <= self._params.min_tokens:
            self._release(text)
            return None
        text, found = self._matcher.push(text)
        self._release(text)
        if found is not None:
            self._stopped = True
            self._deliver(everything=True)
        return found

    def _flush_tail(self) -> None:
        tail = self._detokenizer.flush() if self._detokenizer is not None else ""
        if not tail:
            return
        if self._waiting:
            last = self._waiting[-1]
            last.end += len(tail)
            last.due = last.end
            if last.logprobs is not None:
                shown = last.logprobs[last.token_id].decoded_token or ""
                last.logprobs[last.token_id] = replace(last.logprobs[last.token_id], decoded_token=shown + tail)
        self._made_chars += len(tail)
        self._release(self._matcher.flush() + tail if self._matcher else tail)

    def _release(self, text: str) -> None:
        self._news.text += text
        self._sent_chars += len(text)
        self._deliver()

    def _deliver(self, *, everything: bool = False) -> None:
        while self._waiting and (everything or self._waiting[0].due <= self._sent_chars):
            token = self._waiting.popleft()
            self._news.token_ids.append(token.token_id)
            if self._news.logprobs is not None:
                self._news.logprobs.append(self._cut(token))

    def _cut(self, token: _Token) -> TokenLogprobs:
        """A token's logprobs; the chosen token shows no more of its text than went out."""
        logprobs = token.logprobs or {}
        if token.end > self._sent_chars and token.token_id in logprobs:
            chosen = logprobs[token.token_id]
            shown = (chosen.decoded_token or "")[: max(0, self._sent_chars - token.start)]
            logprobs[token.token_id] = replace(chosen, decoded_token=shown)
        return logprobs


def describe_top(
    tokenizer: Tokenizer | None, detokenizer: IncrementalDetokenizer | None, sampled: SampledLogprobs, limit: int
) -> TokenLogprobs:
    """The ``limit`` best tokens at one place, each with the text it would have added there."""
    best = zip(sampled.top_token_ids[:limit], sampled.top_logprobs[:limit], strict=True)
    return {
        token_id: Logprob(logprob, rank, _own_text(tokenizer, detokenizer, token_id))
        for rank, (token_id, logprob) in enumerate(best, start=1)
    }


def _own_text(tokenizer: Tokenizer | None, detokenizer: IncrementalDetokenizer | None, token_id: int) -> str | None:
    if tokenizer is None or detokenizer is None:
        return None
    # A skipped special token, or an incomplete character: its own spelling tells more than "".
    return detokenizer.peek(token_id) or tokenizer.decode_unchecked([token_id])


def prompt_logprobs(
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    sampled: Sequence[SampledLogprobs],
    params: SamplingParams,
) -> list[TokenLogprobs | None]:
    """One entry per prompt token; None for the first, which nothing predicts. Special tokens show their text."""
    detokenizer = None
    if tokenizer is not None and params.detokenize:
        detokenizer = create_detokenizer(tokenizer, prompt_token_ids[:1], skip_special_tokens=False)
    result: list[TokenLogprobs | None] = [None]
    for place in sampled:
        others = describe_top(tokenizer, detokenizer, place, params.prompt_logprobs or 0)
        text = None if detokenizer is None else detokenizer.push(place.token_id)
        others.pop(place.token_id, None)
        result.append({place.token_id: Logprob(place.logprob, place.rank, text), **others})
    return result
