"""The ``prompt`` field -> token ids, checked against the vocabulary; nothing here waits on the event loop for long."""

import asyncio
from typing import Any

import msgspec

from ..engine.errors import RequestError
from .engine_client import EngineClient


def split_prompts(value: str | list[Any], max_prompts: int) -> list[str] | list[list[int]]:
    """One list entry per prompt: all texts, or all lists of ids. Raises RequestError."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError("prompt is empty", "prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_convert(value, list[int], "prompt must be a list of token ids")]
    if len(value) > max_prompts:
        raise RequestError(f"prompt holds {len(value)} prompts, at most {max_prompts} are allowed", "prompt")
    if isinstance(value[0], str):
        return _convert(value, list[str], "prompt must hold only texts or only token ids")
    return _convert(value, list[list[int]], "prompt must be a text, a list of texts or lists of token ids")


async def encode_prompts(
    engine: EngineClient, prompts: list[str] | list[list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Ids of every prompt. Texts are encoded in the engine's worker pool."""
    for prompt in prompts:
        if not prompt:
            raise RequestError("prompt is empty", "prompt")
    if isinstance(prompts[0], str):
        if engine.tokenizer is None:
            raise RequestError("this server has no tokenizer: send the prompt as token ids", "prompt")
        encoded = await asyncio.gather(*(engine.encode(text, add_special_tokens) for text in prompts))  # type: ignore[arg-type]
    else:
        encoded = list(prompts)  # type: ignore[arg-type]
    for token_ids in encoded:
        check_token_ids(token_ids, engine.config.vocab_size, "prompt")
    return encoded


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises RequestError for ids outside the vocabulary: on the device they would silently read another row."""
    if not token_ids:
        raise RequestError(f"{param} is empty", param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise RequestError(f"{param}: token id {worst} is outside the vocabulary of {vocab_size} tokens", param)


def _convert(value: list[Any], wanted: Any, message: str) -> Any:
    try:
        return msgspec.convert(value, wanted, strict=True)
    except msgspec.ValidationError as error:
        detail = str(error).replace("`", "").replace("$", "prompt")
        raise RequestError(f"{message}: {detail}", "prompt") from None
