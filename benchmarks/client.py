"""One streamed request to an OpenAI-compatible server, timed. Only aiohttp; runs apart from the server."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

READ_BUFFER_BYTES = 1 << 20
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backend name -> its default endpoint."""


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask for, and where. ``prompt`` is a text or, for completions, token ids."""

    url: str
    backend: str
    model: str
    prompt: str | list[int]
    max_tokens: int
    body: dict[str, Any]
    """More fields of the request: sampling options, ``ignore_eos``."""
    headers: dict[str, str]


@dataclass(slots=True)
class Timed:
    """What came back. Times in seconds; ``ttft_s`` and ``latency_s`` count from sending, -1 where it never came.

    ``itl_s`` holds the gaps between chunks with news: a server that merges tokens into chunks has fewer, longer gaps.
    """

    success: bool = False
    ttft_s: float = -1.0
    latency_s: float = -1.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def request_body(call: Call) -> dict[str, Any]:
    """The JSON of a call: streamed, usage asked for in the last chunk. Raises ValueError for ids sent to chat."""
    body: dict[str, Any] = {"model": call.model, "stream": True, "stream_options": {"include_usage": True}, **call.body}
    if call.backend == "openai":
        return {**body, "prompt": call.prompt, "max_tokens": call.max_tokens}
    if not isinstance(call.prompt, str):
        raise ValueError("openai-chat needs prompts with text; this dataset has token ids only")
    messages = [{"role": "user", "content": call.prompt}]
    return {**body, "messages": messages, "max_completion_tokens": call.max_tokens}


async def sse_data(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The payload of every ``data:`` line as soon as the line is whole, up to ``[DONE]``."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip().decode()
                if payload == "[DONE]":
                    return
                yield payload


def chunk_text(choice: dict[str, Any]) -> str:
    """The text that a chunk adds, of a completion or a chat (reasoning included)."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


def is_news(choice: dict[str, Any], text: str) -> bool:
    """Whether a chunk marks a token. One without text does in a completion (half a character, or a hidden token).

    A chunk that only opens a chat message with its role, or only ends the stream, does not.
    """
    return bool(text) or ("delta" not in choice and not choice.get("finish_reason"))


async def send(session: aiohttp.ClientSession, call: Call) -> Timed:
    """Sends one request and reads it to its end. Never raises for what the server does: see ``error``."""
    body = request_body(call)
    result = Timed(start_s=time.perf_counter())
    try:
        async with session.post(call.url, json=body, headers=call.headers) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:500]}"
                return result
            await _read_stream(response.content, result)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    result.latency_s = time.perf_counter() - result.start_s
    if not result.error and result.ttft_s < 0:
        result.error = "the stream ended without a token"
    if not result.error and result.output_tokens == 0:
        result.error = "the stream ended without usage: the server must support stream_options.include_usage"
    result.success = not result.error
    return result


async def _read_stream(content: aiohttp.StreamReader, result: Timed) -> None:
    last_s = result.start_s
    async for payload in sse_data(content):
        now_s = time.perf_counter()
        chunk = json.loads(payload)
        if "error" in chunk:
            result.error = f"error in the stream: {chunk['error']}"
            return
        for choice in chunk.get("choices") or ():
            text = chunk_text(choice)
            result.text += text
            if not is_news(choice, text):
                continue
            if result.ttft_s < 0:
                result.ttft_s = now_s - result.start_s
            else:
                result.itl_s.append(now_s - last_s)
            last_s = now_s
        if usage := chunk.get("usage"):
            result.prompt_tokens = usage.get("prompt_tokens", 0)
            result.output_tokens = usage.get("completion_tokens", 0)
