"""The engine's boundary: what goes in and what comes out, as serialisable messages.

Plain dataclasses, which msgspec can encode: the core runs in a thread or in a process of its
own without the callers noticing, and needs no codec of its own.
"""

import enum
from dataclasses import dataclass

from .sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a choice ended; the values are OpenAI's ``finish_reason`` plus vLLM's abort and error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(enum.StrEnum):
    """What a choice that ended with ``FinishReason.ERROR`` means for its caller."""

    INVALID = "invalid"
    """The request can never be served as given (400)."""
    OVERLOADED = "overloaded"
    """The queue is full: later it may be served (503)."""
    FAILED = "failed"
    """The engine could not finish it (500)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as the core takes it: validated, tokenised. ``sampling_params.n`` choices come of it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time_s: float
    """Seconds, ``time.monotonic()`` of the sender's machine."""
    stop_token_ids: frozenset[int] = frozenset()
    """All ids that end a choice: end-of-sequence ids unless ``ignore_eos``, plus the request's own."""
    eos_token_ids: frozenset[int] = frozenset()
    """The ids among them that are end-of-sequence ids: their stop_reason is None."""
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprobs:
    """Log-probabilities at one position: of the token itself, then of the best ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """Times of one choice, in seconds of ``time.monotonic()``; 0.0 where it has not happened."""

    arrival_time_s: float = 0.0
    first_scheduled_time_s: float = 0.0
    first_token_time_s: float = 0.0
    last_token_time_s: float = 0.0
    finished_time_s: float = 0.0
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class ChoiceOutput:
    """One choice's news of one step."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[SampledLogprobs] | None = None
    prompt_logprobs: list[SampledLogprobs] | None = None
    """Positions 1.. of the prompt; sent once, with choice 0's first token (or its end)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    """Sent with the first token and with the finish."""
    error: str | None = None
    """With ``FinishReason.ERROR``: what went wrong, for the caller."""
    error_kind: ErrorKind | None = None
    """With ``error``. A request refused on arrival, INVALID or OVERLOADED, has no other output."""
    error_param: str | None = None
    """With INVALID: the field at fault, as the caller knows it."""


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Figures of the core after one step; counters are totals since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Used share of the blocks, 0..1."""
    num_scheduled_tokens: int = 0
    """Of this step."""
    prompt_tokens_total: int = 0
    prompt_tokens_computed_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    """In tokens."""
    prefix_cache_hits_total: int = 0
    """In tokens, on the device."""
    external_prefix_cache_queries_total: int = 0
    """Tokens that the device did not have, looked up in host memory."""
    external_prefix_cache_hits_total: int = 0
    """In tokens, in host memory."""
    num_preemptions_total: int = 0
    compiles_after_ready_total: int = 0
    step_failures_total: int = 0
    """Steps that failed and whose requests ran again."""


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """All that one step has to say: one message a step."""

    outputs: list[ChoiceOutput]
    stats: StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Ends a request, or one choice of it, wherever it is; unknown ids are ignored."""

    request_id: str
    index: int | None = None
    """None: all choices."""
    reason: FinishReason = FinishReason.ABORT
    """STOP when a stop string was found where the text is made."""
    num_output_tokens: int | None = None
    """How many of a choice's tokens count: later ones were made before the abort came. None: all."""
