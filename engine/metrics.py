"""What the engine tells about itself; the server turns it into Prometheus metrics and log lines."""

from dataclasses import dataclass
from typing import Protocol

from .messages import FinishReason, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """Figures of one request (all its choices), recorded once, when its last choice ends. Times in seconds."""

    request_id: str
    finish_reason: FinishReason
    """Of the last choice to end."""
    n: int
    max_tokens: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    """Of all choices together."""
    max_num_generation_tokens: int
    """Of the longest choice."""
    num_preemptions: int
    e2e_latency_s: float
    queue_time_s: float
    prefill_time_s: float
    """First scheduled to first token."""
    decode_time_s: float
    """First to last token."""
    time_to_first_token_s: float | None
    """None when no token was made."""
    time_per_output_token_s: float | None
    """Mean gap between tokens; None with fewer than two tokens."""


class StatSink(Protocol):
    """Receives figures; called from the thread that runs the output processor."""

    def record_step(self, stats: StepStats) -> None: ...

    def record_first_token(self, time_to_first_token_s: float) -> None: ...

    def record_inter_token(self, gap_s: float) -> None: ...

    def record_finished(self, finished: FinishedRequest) -> None: ...


class NullStatSink:
    """Drops everything: the offline ``LLM`` has nobody to tell."""

    def record_step(self, stats: StepStats) -> None:
        pass

    def record_first_token(self, time_to_first_token_s: float) -> None:
        pass

    def record_inter_token(self, gap_s: float) -> None:
        pass

    def record_finished(self, finished: FinishedRequest) -> None:
        pass
