"""One choice of a user's request, as the scheduler sees it."""

import enum
from collections.abc import Iterator

from .block_pool import Block
from .messages import EngineRequest, FinishReason, RequestTiming, SampledLogprobs
from .sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """In the waiting queue, never scheduled or sent back to it before its prompt was done."""
    FORKING = enum.auto()
    """A further choice of a request whose prompt choice 0 is computing; it joins when that is done."""
    RUNNING = enum.auto()
    """Holds a row and blocks."""
    PREEMPTED = enum.auto()
    """Lost row and blocks; waits at the front of the queue and recomputes what the cache no longer has."""
    FINISHED = enum.auto()


class Request:
    """A choice: token ids, progress, blocks. Only the scheduler and the KV cache manager change it."""

    __slots__ = (
        "admissions",
        "block_keys",
        "blocks",
        "finish_reason",
        "index",
        "max_total_tokens",
        "needs_host_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_failures",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "queue_key",
        "request_id",
        "row",
        "seed",
        "source",
        "status",
        "stop_reason",
        "suspected",
        "timing",
        "token_ids",
    )

    def __init__(self, source: EngineRequest, index: int, seed: int, arrival: int = 0) -> None:
        self.source = source
        self.request_id = source.request_id
        self.params: SamplingParams = source.sampling_params
        self.index = index
        """The choice, 0..n-1."""
        self.seed = seed
        """64 bits, given or drawn."""
        self.queue_key = (source.priority, arrival, index)
        """The lower, the earlier it runs and the later it is preempted; ``arrival`` counts the engine's requests."""
        self.token_ids = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(source.prompt_token_ids)
        assert self.params.max_tokens is not None, "admission fills it in"
        self.max_total_tokens = self.num_prompt_tokens + self.params.max_tokens
        """Prompt plus ``max_tokens``."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the pool once all dispatched steps are done."""
        self.num_output_placeholders = 0
        """Tokens after ``token_ids`` that dispatched steps draw and whose ids the host has not read."""
        self.needs_host_token = False
        """Its next token cannot be drawn before the host knows the last one: it is not planned ahead."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.admissions = 0
        self.status = RequestStatus.WAITING
        self.row = -1
        """Row of the device state; -1 unless running."""
        self.blocks: list[Block] = []
        self.block_keys: list[bytes] = []
        """Keys of the leading full blocks, as far as they were needed."""
        self.num_published_blocks = 0
        """Leading blocks already offered to the prefix cache."""
        self.prompt_logprobs: list[SampledLogprobs] = []
        """Of prompt positions 1.. so far, when asked for."""
        self.prompt_logprobs_sent = False
        self.num_failures = 0
        """Steps with this request in them that failed."""
        self.suspected = False
        """It was in a step that failed and has not drawn a token since."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.timing = RequestTiming(arrival_time_s=source.arrival_time_s)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, as far as it is known."""
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the next step may compute; the last one may still be known to the device alone.

        The last token of all is never computed, so an end by length is known one step before it comes.
        """
        if self.num_output_placeholders and self.needs_host_token:
            return 0
        known_places = len(self.token_ids) + self.num_output_placeholders
        return min(known_places, self.max_total_tokens - 1) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Still needs logprobs of prompt positions: choice 0 only, all n share the prompt."""
        return (
            self.params.prompt_logprobs is not None
            and self.index == 0
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}[{self.index}], {self.status.name}, row={self.row}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens}, blocks={len(self.blocks)})"
        )


def seed_stream(seed: int) -> Iterator[int]:
    """64-bit seeds for requests that give none: splitmix64 from the engine's seed."""
    state = seed & (2**64 - 1)
    while True:
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        yield z ^ (z >> 31)
