"""Response bodies in OpenAI's shapes, with vLLM's additions (stop_reason, token_ids, prompt_logprobs)."""

from typing import Any

import msgspec

from ...engine.outputs import CompletionOutput, TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not (the value that vLLM sends)."""

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def token_text(token_id: int, logprobs: TokenLogprobs, as_id: bool) -> str:
    entry = logprobs.get(token_id)
    if as_id or entry is None or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


def best(logprobs: TokenLogprobs, count: int) -> list[int]:
    """The ids of the ``count`` most likely tokens, best first."""
    return sorted(logprobs, key=lambda token_id: logprobs[token_id].rank)[:count]


def chat_logprobs(choice: CompletionOutput, top: int, as_ids: bool) -> dict[str, Any] | None:
    """``choices[].logprobs`` of the chat API: ``content`` has one entry per token, ``top`` alternatives in each."""
    if choice.logprobs is None:
        return None

    def entry(token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        text = token_text(token_id, logprobs, as_ids)
        return {"token": text, "logprob": finite(logprobs[token_id].logprob), "bytes": list(text.encode("utf-8"))}

    content = []
    for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=False):
        alternatives = [entry(other, logprobs) for other in best(logprobs, top)]
        content.append(entry(token_id, logprobs) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``choices[].logprobs`` of the completions API; ``offset`` goes on from chunk to chunk, in characters."""

    def __init__(self, top: int, as_ids: bool) -> None:
        self.top = top
        self.as_ids = as_ids
        self.offset = 0

    def encode(
        self, token_ids: list[int], logprobs: list[TokenLogprobs | None], first_text: str = ""
    ) -> dict[str, Any]:
        """Where ``logprobs`` has None (the first prompt token) the token is ``first_text`` and has no value."""
        result: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            alternatives: dict[str, float] | None = None
            value: float | None = None
            if entry is None:
                text = f"token_id:{token_id}" if self.as_ids else first_text
            else:
                text = token_text(token_id, entry, self.as_ids)
                value = finite(entry[token_id].logprob)
                alternatives = {}
                for other in (token_id, *best(entry, self.top)):
                    alternatives.setdefault(token_text(other, entry, self.as_ids), finite(entry[other].logprob))
            result["text_offset"].append(self.offset)
            result["token_logprobs"].append(value)
            result["tokens"].append(text)
            result["top_logprobs"].append(alternatives)
            self.offset += len(text)
        return result


def prompt_logprobs(entries: list[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: per position null or token id -> logprob, rank, decoded_token."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
            for token_id, item in entry.items()
        }
        for entry in entries
    ]
