"""One way to stream: the first output before the status, chunks, usage, end (rules R7 and R8)."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from ..engine.outputs import CompletionOutput, RequestOutput
from .generation import Usage, aborted, check_finish
from .protocol.requests import StreamOptions
from .protocol.responses import encode_json
from .sse import CLIENT_GONE, EventStream, frame

logger = logging.getLogger(__name__)

Chunk = dict[str, Any]


_ANY_TEXT = "\0any text\0"


class ChunkBuilder(Protocol):
    """Makes the chunks of one API; keeps what it needs from chunk to chunk."""

    @property
    def only_text(self) -> bool:
        """Whether a chunk between a choice's first and last one says nothing but its text."""
        ...

    def start(self) -> list[Chunk]:
        """Chunks before the first output."""
        ...

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        """Chunks of one output: at most one per choice."""
        ...

    def usage_chunk(self) -> Chunk:
        """A chunk with no choices, for the usage at the end."""
        ...


def has_news(choice: CompletionOutput, wants_logprobs: bool, wants_ids: bool) -> bool:
    """Whether a choice's delta is worth a chunk: empty content deltas are not sent."""
    return bool(choice.text or choice.finished or ((wants_logprobs or wants_ids) and choice.token_ids))


class FrameEncoder:
    """Outputs to frames, each with its line of JSON. What surrounds a plain piece of text is encoded once a choice."""

    def __init__(self, builder: ChunkBuilder, usage: Usage, options: StreamOptions | None) -> None:
        self._builder = builder
        self._usage = usage
        self.include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._only_text = builder.only_text and not self._continuous
        self._around: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def start(self) -> list[bytes]:
        """Frames before the first output."""
        return [self._encode(chunk) for chunk in self._builder.start()]

    def frames(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        if self._only_text and not any(choice.finished for choice in output.outputs):
            return [self._text_frame(prompt_index, choice) for choice in output.outputs if choice.text]
        return [self._encode(chunk) for chunk in self._builder.chunks(prompt_index, output)]

    def usage(self) -> bytes:
        """The frame with the usage and no choices."""
        return frame(encode_json(self._builder.usage_chunk() | {"usage": self._usage.encode()}))

    def _encode(self, chunk: Chunk) -> bytes:
        if self._continuous:
            chunk["usage"] = self._usage.encode()
        elif self.include_usage:
            chunk["usage"] = None
        return frame(encode_json(chunk))

    def _text_frame(self, prompt_index: int, choice: CompletionOutput) -> bytes:
        around = self._around.get((prompt_index, choice.index))
        if around is None:
            example = RequestOutput("", None, [], [CompletionOutput(choice.index, _ANY_TEXT, [])])
            [chunk] = self._builder.chunks(prompt_index, example)
            before, _, after = self._encode(chunk).partition(encode_json(_ANY_TEXT))
            around = self._around[prompt_index, choice.index] = before, after
        return around[0] + encode_json(choice.text) + around[1]


async def stream_response(
    request: web.Request,
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    builder: ChunkBuilder,
    usage: Usage,
    options: StreamOptions | None,
    stall_timeout_s: float,
    count_choices: bool = True,
) -> web.StreamResponse:
    """Streams ``outputs``. Errors before the first output are raised, later ones end the stream as an event."""
    events = EventStream(request, stall_timeout_s)
    encoder = FrameEncoder(builder, usage, options)
    started = False
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                for choice in output.outputs:
                    check_finish(choice)
                usage.add(index, output, count_choices)
                frames = encoder.frames(index, output)
                if not started:
                    started = True
                    frames = encoder.start() + frames
                if frames:
                    await events.send(b"".join(frames))
        if not started:
            raise aborted()
        if encoder.include_usage:
            await events.send(encoder.usage())
        return await events.end()
    except ConnectionError as error:
        logger.info("stream dropped: %s", error)
        return web.Response(status=CLIENT_GONE)  # for log and metrics: its connection is closed
    except Exception as error:
        return await events.fail(error)
