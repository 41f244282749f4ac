"""From results of the step to messages."""

from .messages import ChoiceOutput, ErrorKind, SampledLogprobs
from .request import Request
from .scheduler_output import PromptLogprobs, SampledRows


def sampled_logprobs(source: SampledRows | PromptLogprobs, entry: int, count: int) -> SampledLogprobs:
    """One position's log-probabilities with the ``count`` best alternatives."""
    return SampledLogprobs(
        token_id=int(source.token_ids[entry]),
        logprob=float(source.logprobs[entry]),
        rank=int(source.ranks[entry]),
        top_token_ids=source.top_token_ids[entry, :count].tolist(),
        top_logprobs=source.top_logprobs[entry, :count].tolist(),
    )


def choice_output(
    request: Request, token_ids: list[int], logprobs: list[SampledLogprobs] | None = None, error: str | None = None
) -> ChoiceOutput:
    """A choice's news; prompt logprobs go out once, with the first token or the end; times with both."""
    first = request.num_output_tokens == len(token_ids)
    if not first and request.finish_reason is None:  # nearly always
        return ChoiceOutput(
            request_id=request.request_id,
            index=request.index,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens,
        )
    prompt_logprobs = None
    if request.index == 0 and request.params.prompt_logprobs is not None:
        prompt_logprobs, request.prompt_logprobs_sent = _unsent(request), True
    return ChoiceOutput(
        request_id=request.request_id,
        index=request.index,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        timing=request.timing,
        error=error,
        error_kind=None if error is None else ErrorKind.FAILED,
    )


def take_prompt_logprobs(request: Request, sampled: SampledRows, entry: int) -> None:
    """Appends the positions that are new; after a preemption some are computed a second time."""
    part = sampled.prompt_logprobs[entry]
    top = request.params.prompt_logprobs or 0
    for offset in range(len(part.token_ids)):
        if part.first + offset == len(request.prompt_logprobs) + 1:
            request.prompt_logprobs.append(sampled_logprobs(part, offset, top))


def _unsent(request: Request) -> list[SampledLogprobs] | None:
    return None if request.prompt_logprobs_sent else request.prompt_logprobs
