"""What can never run is refused on arrival (rule R10)."""

from .errors import RequestError


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
