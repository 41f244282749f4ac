"""What a caller gets back: results per request and per choice (names as in vLLM)."""

from dataclasses import dataclass, field

from .messages import FinishReason, RequestTiming


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log, of the raw logits' softmax).

    ``rank`` counts from 1; ``decoded_token`` is the text that this token adds.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""token id -> Logprob; the chosen token is always among the keys."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice. With ``OutputKind.DELTA`` text, token ids and logprobs hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request, or with ``OutputKind.DELTA`` what is new in it.

    ``prompt_logprobs[0]`` is None: nothing predicts the first token. ``num_cached_tokens``
    counts prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestTiming | None = None
