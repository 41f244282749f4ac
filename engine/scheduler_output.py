"""What the scheduler decided for one step, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .host_tier import ChunkCopy
from .request import Request


@dataclass(slots=True)
class ScheduledRow:
    """One request's part of a step: ``num_tokens`` of its tokens from ``start`` on."""

    request: Request
    start: int
    num_tokens: int
    """0 for a fork: it samples from its parent's logits."""
    admitted: bool
    """The request got this row just now: the row's device state is written in full."""
    new_block_ids: Sequence[int]
    """Blocks added to the end of the table in this step (all of them when admitted)."""
    samples: bool
    """The last of the tokens is the sequence's last one: its logits give a new token."""
    parent: "ScheduledRow | None" = None
    """For a fork: the row whose logits it samples from."""


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. ``rows`` holds forks last."""

    rows: list[ScheduledRow] = field(default_factory=list)
    num_tokens: int = 0
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) block ids, copied on the device after the step."""
    chunk_copies: list[ChunkCopy] = field(default_factory=list)
    """Between the pool and host memory, on the device before the step, in this order."""
    preempted: list[Request] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """At least one of its requests has not ended."""
        return any(not row.request.finished for row in self.rows)

    @property
    def decode_only(self) -> bool:
        """One token a row, no forks."""
        return all(row.num_tokens == 1 for row in self.rows)


@dataclass(slots=True)
class SampledRows:
    """Results of a step on the host, one entry per row of the plan, in its order."""

    token_ids: np.ndarray
    """i32[R]"""
    finite: np.ndarray
    """bool[R]: all logits of the row were finite."""
    logprobs: np.ndarray
    """f32[R], of the token."""
    ranks: np.ndarray
    """i32[R], from 1."""
    top_token_ids: np.ndarray
    """i32[R, 20], best first."""
    top_logprobs: np.ndarray
    """f32[R, 20]"""
    prompt_logprobs: dict[int, "PromptLogprobs"] = field(default_factory=dict)
    """By entry of the plan."""


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at positions ``first`` .. ``first + P - 1``."""

    first: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray
