"""Who may come in: what can never run is refused on arrival (rule R10), and what would make the queue too long."""

from dataclasses import dataclass

from .errors import QueueFullError, RequestError
from .messages import EngineRequest


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait; None: any number."""

    max_num_reqs: int | None = None
    """Choices that wait, beyond those for which there are rows."""
    max_num_tokens: int | None = None
    """Prompt tokens of all requests that wait."""

    def check(self, source: EngineRequest, num_open: int, num_rows: int, num_queued_tokens: int) -> None:
        """Raises QueueFullError when ``source`` has to come again later, RequestError when it could never come in.

        ``num_open`` choices run or wait, in an engine with ``num_rows`` rows. A prompt longer than the limit of tokens
        is taken when none waits: it would be refused for ever otherwise.
        """
        n, num_tokens = source.sampling_params.n, len(source.prompt_token_ids)
        if self.max_num_reqs is not None:
            if n > num_rows + self.max_num_reqs:
                raise RequestError(
                    f"n is {n}: at most {num_rows + self.max_num_reqs} choices may run and wait at once here", "n"
                )
            if num_open + n > num_rows + self.max_num_reqs:
                raise QueueFullError(
                    f"the queue is full: {num_open} choices run or wait, at most {num_rows} can run and "
                    f"{self.max_num_reqs} more may wait"
                )
        limit = self.max_num_tokens
        if limit is not None and num_queued_tokens and num_queued_tokens + num_tokens > limit:
            raise QueueFullError(
                f"the queue is full: {num_queued_tokens} prompt tokens wait and this request has {num_tokens}, "
                f"at most {limit} may wait"
            )


def check_fits(
    num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int, block_size: int, num_usable_blocks: int
) -> None:
    """Raises RequestError when the request cannot fit the context or the whole KV cache; nothing is ever cut."""
    total = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if num_prompt_tokens + 1 > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens, and at least one must be left for the output.",
            "input_tokens",
        )
    if total > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} tokens "
            f"({num_prompt_tokens} in the prompt, {max_tokens} for the output).",
            "max_tokens",
        )
    needed = -(-total // block_size)
    if needed > num_usable_blocks:
        raise RequestError(
            f"The request may need {needed} KV blocks of {block_size} tokens, but the whole cache has "
            f"{num_usable_blocks}.",
            "max_tokens",
        )
